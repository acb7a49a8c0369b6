"""Files and datasets to documents: plain text, JSONL, parquet, and what the package datasets loads."""
