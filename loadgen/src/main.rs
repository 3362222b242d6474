//! The binary.

#[global_allocator]
static ALLOCATOR: loadgen::allocations::Counting = loadgen::allocations::Counting;

use clap::Parser;

fn main() -> std::process::ExitCode {
    let cli = loadgen::cli::Cli::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let scenario = loadgen::scenario::Scenario::check(&cli.run).unwrap();
        let target = loadgen::target::Target::open(cli.run.database_url.as_deref()).await.unwrap();
        for _ in 0..2 {
            let figures = loadgen::baselines::seed_cycle::measure(&target, &scenario, 1).await;
            println!("{}", serde_json::to_string_pretty(&figures.unwrap()).unwrap());
            let figures = loadgen::baselines::insert_ceiling::measure(&target, &scenario, 1).await;
            println!("{}", serde_json::to_string_pretty(&figures.unwrap()).unwrap());
        }
    });
    std::process::ExitCode::SUCCESS
}
