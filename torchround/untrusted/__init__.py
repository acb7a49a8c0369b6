"""Defence against hostile input: what files of others may cost, hold and print. Imports no other room."""
