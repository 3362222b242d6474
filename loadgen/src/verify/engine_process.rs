//! stub
use clap::Args;
/// stub
#[derive(Clone, Debug, Args)]
pub struct EngineArgs {}
/// stub
/// # Errors
/// never
pub async fn run(_: EngineArgs) -> crate::failure::Result<()> {
    Ok(())
}
