"""Text to token ids: tokenizers, the vocabulary files they are read from, and chat templates."""
