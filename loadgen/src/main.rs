//! The binary: reads the command line, does what it says, ends with 0 (kept), 1 (a promise is broken) or
//! 2 (could not be done).

use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use loadgen::cli::{Cli, Command};
use loadgen::failure::{Failure, Result};
use loadgen::{compare, report, run, sink, verify};
use tracing_subscriber::EnvFilter;

#[global_allocator]
static ALLOCATOR: loadgen::allocations::Counting = loadgen::allocations::Counting;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter = EnvFilter::try_from_env("RUST_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    match start(cli) {
        Ok(false) => ExitCode::SUCCESS,
        Ok(true) => {
            eprintln!("loadgen: a promise is broken");
            ExitCode::from(1)
        }
        Err(failure) => {
            eprintln!("loadgen: {failure}");
            ExitCode::from(2)
        }
    }
}

/// Answers whether a promise is broken.
fn start(cli: Cli) -> Result<bool> {
    let command = cli.command.unwrap_or_else(|| Command::Run(Box::new(cli.run)));
    let threads = match &command {
        Command::Run(args) => args.producers,
        Command::Compare(args) => args.load.producers,
        _ => 2,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads.clamp(1, 64))
        .enable_all()
        .build()
        .map_err(Failure::io("starting threads"))?;
    runtime.block_on(async {
        tokio::select! {
            outcome = dispatch(command) => outcome,
            // Everything on the stack is dropped: the private server ends and its directory goes.
            _ = interrupted() => Err(Failure::Interrupted),
        }
    })
}

async fn dispatch(command: Command) -> Result<bool> {
    let (outcome, json) = match command {
        Command::Run(args) => (run::run(&args).await?, args.json),
        Command::Compare(args) => (compare::compare(&args).await?, args.load.json),
        Command::Verify(args) => (verify::verify(&args).await?, args.load.json),
        Command::Sink(args) => return sink::server::run(args).await.map(|()| false),
        Command::Engine(args) => return verify::engine_process::run(*args).await.map(|()| false),
    };
    if let Some(path) = json.as_deref().map(Path::new) {
        report::write_json(path, &outcome.json)?;
    }
    Ok(outcome.broken)
}

async fn interrupted() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut interrupt), Ok(mut terminate)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
}
