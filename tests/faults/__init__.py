"""What becomes of requests when something under objkv fails: each fault, each verb, each mode."""
