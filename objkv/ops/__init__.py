"""What operators ask: look, check, explain. Plain values come back; nothing here prints."""
