"""The broker and its clients as processes: a Unix socket for each device, one JSON object a line."""
