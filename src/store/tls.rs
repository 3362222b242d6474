//! TLS to Postgres: libpq's words for how much is verified, over any stream, on any executor.
//!
//! Invariants
//! - `verify-ca` and `verify-full` accept no chain that does not end in the given root (or, without one, in the
//!   system's trust store); `verify-full` also wants the host's name.
//! - `prefer` and `require` without a root verify nobody: they keep out listeners, not impostors. As with libpq,
//!   `require` with a root is `verify-ca`.
//! - In every mode the handshake's signature is checked: the peer has the key of the certificate it shows.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};

use super::target::{ConnectTarget, TargetError, TlsMode};

/// What a target's `sslmode` comes to; `None` where it wants no TLS. Reads certificates, so it may take
/// milliseconds: once a process, not once a connection.
pub(super) fn client_config(target: &ConnectTarget) -> Result<Option<Arc<ClientConfig>>, TargetError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier: Arc<dyn ServerCertVerifier> = match (target.tls_mode, &target.root_certificates) {
        (TlsMode::Disable, _) => return Ok(None),
        (TlsMode::Prefer, _) | (TlsMode::Require, None) => Arc::new(Unverified(provider.clone())),
        (mode, _) => {
            let roots = Arc::new(roots(target)?);
            let chain = WebPkiServerVerifier::builder_with_provider(roots, provider.clone())
                .build()
                .map_err(|error| TargetError::Tls(format!("the root certificates cannot be used: {error}")))?;
            if mode == TlsMode::VerifyFull { chain } else { Arc::new(AnyName(chain)) }
        }
    };
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| TargetError::Tls(error.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    // `sslnegotiation=direct` requires it; a server that is asked the usual way does not mind.
    config.alpn_protocols = vec![b"postgresql".to_vec()];
    Ok(Some(Arc::new(config)))
}

fn roots(target: &ConnectTarget) -> Result<RootCertStore, TargetError> {
    let mut store = RootCertStore::empty();
    match &target.root_certificates {
        Some(path) if path.as_os_str() != "system" => {
            let unreadable =
                |error: String| TargetError::Tls(format!("sslrootcert {} cannot be read: {error}", path.display()));
            let certificates = CertificateDer::pem_file_iter(path).map_err(|error| unreadable(error.to_string()))?;
            for certificate in certificates {
                let certificate = certificate.map_err(|error| unreadable(error.to_string()))?;
                store.add(certificate).map_err(|error| unreadable(error.to_string()))?;
            }
        }
        _ => {
            // Single certificates of a system's store may be broken without harm.
            store.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    if store.is_empty() {
        return Err(TargetError::Tls("there is no root certificate to verify the server by (sslrootcert)".to_owned()));
    }
    Ok(store)
}

/// Makes one TLS session for tokio-postgres.
pub(super) struct Tls {
    pub(super) config: Arc<ClientConfig>,
    /// As the operator wrote it.
    pub(super) host: String,
}

impl<S: AsyncRead + AsyncWrite + Unpin + 'static> TlsConnect<S> for Tls {
    type Stream = TlsSession<S>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TlsSession<S>>>>>;

    fn connect(self, stream: S) -> Self::Future {
        Box::pin(async move {
            let name = ServerName::try_from(self.host)
                .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the host is not a name TLS can ask for"))?;
            Ok(TlsSession(tokio_rustls::TlsConnector::from(self.config).connect(name, stream).await?))
        })
    }
}

/// A stream inside TLS.
pub(super) struct TlsSession<S>(tokio_rustls::client::TlsStream<S>);

impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for TlsSession<S> {
    fn channel_binding(&self) -> ChannelBinding {
        // It would need the certificate's signature algorithm. SCRAM without it is what every server offers.
        ChannelBinding::none()
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for TlsSession<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_read(cx, buf)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for TlsSession<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().0).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_shutdown(cx)
    }
}

/// Accepts whoever holds the key of the certificate shown.
#[derive(Debug)]
struct Unverified(Arc<CryptoProvider>);

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Verifies the chain and lets the name be any.
#[derive(Debug)]
struct AnyName(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        // The name is looked at last: whoever fails by it has a good chain.
        match self.0.verify_server_cert(certificate, chain, name, ocsp, now) {
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            other => other,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}
