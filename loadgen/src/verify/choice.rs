//! Which faults a verification makes: those asked for, as far as this database and this machine allow them.
//!
//! Invariant: faults that touch the server's processes or its socket exist on the private server only, and are
//! refused by name elsewhere.

use crate::cli::FaultChoice;
use crate::failure::{Failure, Result};

/// What is broken by a step. Foreign writers run all the time and are no steps.
pub const STEPS: [FaultChoice; 20] = [
    FaultChoice::Refuse,
    FaultChoice::Late,
    FaultChoice::Unknown,
    FaultChoice::SinkKill,
    FaultChoice::Cut,
    FaultChoice::CommitCut,
    FaultChoice::BackendKill,
    FaultChoice::ServerRestart,
    FaultChoice::ReadOnly,
    FaultChoice::StatementTimeout,
    FaultChoice::Conflicts,
    FaultChoice::NetworkDelay,
    FaultChoice::NetworkLoss,
    FaultChoice::Skew,
    FaultChoice::EngineStop,
    FaultChoice::EngineKill,
    FaultChoice::EngineStall,
    FaultChoice::HangUp,
    FaultChoice::ShortLocks,
    FaultChoice::Redeliver,
];

/// Writers.
pub const WRITERS: [FaultChoice; 4] =
    [FaultChoice::ForeignSql, FaultChoice::Enlisted, FaultChoice::LowerXid, FaultChoice::RepeatableRead];

/// Whether a fault needs a server that is ours.
#[must_use]
pub fn needs_private_server(fault: FaultChoice) -> bool {
    matches!(
        fault,
        FaultChoice::CommitCut
            | FaultChoice::BackendKill
            | FaultChoice::ServerRestart
            | FaultChoice::ReadOnly
            | FaultChoice::StatementTimeout
            | FaultChoice::NetworkDelay
            | FaultChoice::NetworkLoss
    )
}

/// Whether a fault is one of a broker that delivers.
#[must_use]
pub fn needs_relay(fault: FaultChoice) -> bool {
    matches!(fault, FaultChoice::HangUp | FaultChoice::ShortLocks | FaultChoice::Redeliver)
}

/// The faults asked for.
///
/// # Errors
/// [`Failure::Usage`] naming those that a given database, or this machine, does not allow.
pub fn choose(asked: &[FaultChoice], private: bool, relays: bool) -> Result<Vec<FaultChoice>> {
    if asked.contains(&FaultChoice::None) {
        return if asked.len() == 1 {
            Ok(Vec::new())
        } else {
            Err(Failure::Usage("--faults none stands alone".into()))
        };
    }
    if asked.contains(&FaultChoice::All) {
        let all = STEPS.iter().chain(&WRITERS).copied();
        let skews = super::clock::is_possible();
        return Ok(all
            .filter(|fault| {
                (private || !needs_private_server(*fault))
                    && (relays || !needs_relay(*fault))
                    && (skews || *fault != FaultChoice::Skew)
            })
            .collect());
    }
    if asked.contains(&FaultChoice::Skew) && !super::clock::is_possible() {
        return Err(Failure::Usage(
            "--faults skew: needs Linux and cc, to build a library that moves the clock".into(),
        ));
    }
    if let Some(fault) = asked.iter().find(|fault| !relays && needs_relay(**fault)) {
        return Err(Failure::Usage(format!("--faults {}: belongs to --scenario relay", name(*fault))));
    }
    let refused: Vec<String> =
        asked.iter().filter(|fault| !private && needs_private_server(**fault)).map(|fault| name(*fault)).collect();
    if !refused.is_empty() {
        return Err(Failure::Usage(format!(
            "--faults {}: not with --database-url: loadgen touches the processes and the socket of its own server only",
            refused.join(",")
        )));
    }
    Ok(asked.to_vec())
}

/// The word of the command line.
#[must_use]
pub fn name(fault: FaultChoice) -> String {
    use clap::ValueEnum;
    fault.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_of_the_server_are_refused_by_name_elsewhere() {
        let error = choose(&[FaultChoice::BackendKill, FaultChoice::Cut], false, false).unwrap_err().to_string();
        assert!(error.contains("backend-kill") && !error.contains("cut,"), "{error}");
        let all = choose(&[FaultChoice::All], false, false).unwrap();
        assert!(all.contains(&FaultChoice::EngineKill) && !all.contains(&FaultChoice::ServerRestart));
        assert_eq!(choose(&[FaultChoice::All], true, true).unwrap().len(), STEPS.len() + WRITERS.len());
        assert!(choose(&[FaultChoice::None], false, false).unwrap().is_empty());
        assert!(choose(&[FaultChoice::None, FaultChoice::Cut], true, false).is_err());
        let error = choose(&[FaultChoice::HangUp], true, false).unwrap_err().to_string();
        assert!(error.contains("hang-up") && error.contains("relay"), "{error}");
        let without = choose(&[FaultChoice::All], true, false).unwrap();
        assert!(!without.contains(&FaultChoice::Redeliver) && without.contains(&FaultChoice::BackendKill));
    }
}
