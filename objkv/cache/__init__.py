"""The chunk cache: matching, background lookups, admission, and the order of reads and writes."""
