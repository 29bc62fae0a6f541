"""Which copy: matching, lookups in the background, and the one right order of reads and writes."""
