"""The way from text to token ids: tokenizers, their vocabulary files, and chat templates."""
