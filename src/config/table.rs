//! The table of docs/tuning.md, written from the keys so that it cannot fall behind them.

use super::{Bounds, Config, Value};

/// All keys as a Markdown table.
#[must_use]
pub fn tuning_table() -> String {
    let defaults = Config::default();
    let mut text = String::from(
        "| key | default | unit | allowed | figure that moves | why it is so |\n\
         |---|---|---|---|---|---|\n",
    );
    for (index, key) in Config::keys().iter().enumerate() {
        let default = match defaults.value(index) {
            Value::Text(text) if text.is_empty() => "(empty)".to_owned(),
            value => format!("`{value}`"),
        };
        let allowed = match key.bounds {
            Bounds::Choice(names) => names.join(", "),
            bounds => bounds.to_string(),
        };
        text.push_str(&format!(
            "| `{}` | {default} | {} | {allowed} | {} | {} |\n",
            key.name, key.unit, key.moves, key.reason
        ));
    }
    text
}
