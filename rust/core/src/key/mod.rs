//! Canonical graph bytes and keys made of named components.
