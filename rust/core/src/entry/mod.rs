//! The format of one cache entry: one immutable, self-describing file.
