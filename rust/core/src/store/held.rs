//! Entries that somebody in this process holds: looking one up again takes no system call.
//!
//! Only as long as it is held, so that the store itself keeps no file from being freed. What is held
//! was checked, and stays the right answer when its file goes: equal keys mean equal work. A forked
//! child may inherit the table while it is locked, so it leaves its parent's alone.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock, RwLockWriteGuard, Weak};

use super::fork::generation;
use super::lookup::{Content, Entry};
use crate::digest::Digest;
use crate::entry::Kind;

/// Places of the table before what is held no more is first removed from it.
const FIRST_LIMIT: usize = 64;

type Places = HashMap<(Kind, Digest), Weak<Content>>;

/// The table of one store.
#[derive(Debug)]
pub(super) struct Held {
    places: RwLock<Places>,
    generation: u32,
}

impl Held {
    pub(super) fn new() -> Self {
        Self {
            places: RwLock::default(),
            generation: generation(),
        }
    }

    pub(super) fn get(&self, kind: Kind, key: &Digest) -> Option<Entry> {
        if self.generation != generation() {
            return None;
        }
        let places = self.places.read().unwrap_or_else(PoisonError::into_inner);
        places.get(&(kind, *key)).and_then(Entry::upgrade)
    }

    fn write(&self) -> Option<RwLockWriteGuard<'_, Places>> {
        (self.generation == generation())
            .then(|| self.places.write().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn insert(&self, entry: &Entry) {
        let Some(mut places) = self.write() else {
            return;
        };
        // At most half of the places are of the dead after each doubling: amortised constant time.
        if places.len() >= FIRST_LIMIT && places.len() == places.capacity() {
            places.retain(|_, content| content.strong_count() > 0);
        }
        places.insert((entry.kind(), *entry.key()), entry.downgrade());
    }

    /// Forgets an entry of whatever kind that this process has removed.
    pub(super) fn remove(&self, key: &Digest) {
        if let Some(mut places) = self.write() {
            for kind in Kind::ALL {
                places.remove(&(kind, *key));
            }
        }
    }
}
