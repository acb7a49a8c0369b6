"""Readers that turn files and datasets into documents: plain text, JSONL, parquet, and what the package datasets loads."""
