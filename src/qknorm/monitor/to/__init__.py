"""Where records and alerts go, one file per destination. Each is optional but the JSON lines."""
