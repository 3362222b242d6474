//! stub
use clap::Args;
/// stub
#[derive(Clone, Debug, Args)]
pub struct SinkArgs {}
