//! NEFF containers: parse, validate, write.
