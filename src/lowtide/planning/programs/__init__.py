"""Programs: which op runs when, what is freed, and how many bytes that takes."""
