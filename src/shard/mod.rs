//! One core's life: the loops that do what `plan` decides.

pub mod claim;
pub mod flush;
pub mod publish;
pub mod settle;
pub mod state;
pub mod tend;
