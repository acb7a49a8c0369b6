"""Several machines as one run: the group they form, the channels and links between them, and how a loss is noticed."""
