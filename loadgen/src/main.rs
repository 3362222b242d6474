//! The binary: reads the command line, does what it says, ends with 0 (kept), 1 (a promise is broken) or
//! 2 (could not be done).

use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use loadgen::cli::{Cli, Command};
use loadgen::failure::{Failure, Result};
use loadgen::run::Ending;
use loadgen::{compare, report, run, running, sink, strategies, verify};
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
        Ok(Ending::Held) => ExitCode::SUCCESS,
        Ok(Ending::Broken) => {
            eprintln!("loadgen: a promise is broken");
            ExitCode::from(1)
        }
        Ok(Ending::Undecided) => ExitCode::from(2),
        Err(failure) => {
            eprintln!("loadgen: {failure}");
            ExitCode::from(2)
        }
    }
}

fn start(cli: Cli) -> Result<Ending> {
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
        let mut work = std::pin::pin!(dispatch(command));
        tokio::select! {
            outcome = &mut work => outcome,
            _ = interrupted() => {
                // The engines first; then the work is dropped: the private server ends and its directory goes.
                running::end_running().await;
                Err(Failure::Interrupted)
            }
        }
    })
}

async fn dispatch(command: Command) -> Result<Ending> {
    let json = command.json().map(Path::to_owned);
    if let Some(path) = &json {
        report::check_writable(path)?;
    }
    let outcome = match command {
        Command::Run(args) => run::run(&args).await?,
        Command::Compare(args) => compare::compare(&args).await?,
        Command::Strategies(args) => strategies::strategies(&args).await?,
        Command::Verify(args) => verify::verify(&args).await?,
        Command::Sink(args) => return sink::server::run(args).await.map(|()| Ending::Held),
        Command::Engine(args) => return verify::engine_process::run(*args).await.map(|()| Ending::Held),
        Command::Relay(args) => return verify::relay_process::run(*args).await.map(|()| Ending::Held),
    };
    if let Some(path) = &json {
        report::write_json(path, &outcome.json)?;
    }
    Ok(outcome.ending)
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
