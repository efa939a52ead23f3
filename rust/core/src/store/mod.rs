//! A directory of entries in which the file system is the index.
