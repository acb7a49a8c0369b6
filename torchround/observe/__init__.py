"""Everything that a run reports: a file, the console, Weights & Biases. A report that fails never fails a step."""
