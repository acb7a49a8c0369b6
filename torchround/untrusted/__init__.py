"""Defence against hostile input: checks and limits for files from untrusted senders. Imports no other room."""
