//! `verify`: everything is broken on purpose, and an oracle that shares nothing with the engine judges.

pub mod engine_process;
pub mod foreign;
pub mod oracle;
pub mod proxy;

use crate::cli::VerifyArgs;
use crate::failure::{Failure, Result};
use crate::run::Outcome;

/// stub
/// # Errors
/// always
pub async fn verify(_: &VerifyArgs) -> Result<Outcome> {
    Err(Failure::Usage("not yet".into()))
}
