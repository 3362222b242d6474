//! stub
pub mod engine_process;
