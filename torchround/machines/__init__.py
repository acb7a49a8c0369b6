"""What several machines of one run share: who they are, the bytes between them, and who has failed."""
