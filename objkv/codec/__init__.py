"""The payload format: encoding, verification, compression and sealing."""
