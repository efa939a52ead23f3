//! A directory of entries in which the file system is the index.
//!
//! `docs/entry-format.md` is the specification. Any number of processes read and write one store;
//! nothing but a directory is shared. Laws:
//!
//! * A published file is never written to, truncated or renamed over.
//! * A look-up takes no lock, writes nothing but the time of the last use, and never fails: what
//!   cannot be used is a miss.
//! * State shared between threads is atomic, or only tried for (`try_read`), or left alone by forked
//!   children: they may inherit a lock that nobody will free.

mod error;
mod evict;
mod fork;
mod held;
mod last_use;
mod list;
mod lock;
mod lookup;
mod mac;
mod publish;
#[cfg(test)]
mod tests;
mod tree;
mod trust;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

use rustix::fs::{AtFlags, unlinkat};
use rustix::io::Errno;

pub use error::StoreError;
pub use evict::{EvictedEntry, Eviction, EvictionLimits};
pub use fork::after_fork_in_child;
pub use lock::{Holder, KeyLock};
pub use lookup::{Entry, EntryInfo, SectionBytes, Verify};
pub use mac::MacKey;

use crate::digest::Digest;
use crate::entry::{EntryWriter, Kind};
use held::Held;
use lookup::Unfit;
use publish::{Link, Prepared};
use tree::{Tree, fan_out};

/// How often a publication starts anew when somebody keeps removing its directories.
const ATTEMPTS: usize = 64;

/// What a look-up found.
#[derive(Debug)]
pub enum Lookup {
    /// The entry.
    Hit(Entry),
    /// There is none.
    Miss,
    /// There is something that cannot be used: a miss with a reason.
    Refused(StoreError),
}

/// What became of a publication.
#[derive(Debug)]
pub struct Published {
    /// False if a sound entry was there already.
    pub is_new: bool,
    /// What went wrong on the way without being in the way.
    pub problems: Vec<StoreError>,
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        #[derive(Debug, Default)]
        struct AtomicCounters { $($name: AtomicU64),+ }

        /// How often things happened in one [`Store`] object.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct Counters { $($(#[$doc])* pub $name: u64),+ }

        impl AtomicCounters {
            fn read(&self) -> Counters {
                Counters { $($name: self.$name.load(Ordering::Relaxed)),+ }
            }
        }

        impl Counters {
            /// Every counter with its name.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),+].into_iter()
            }
        }
    };
}

counters! {
    /// Look-ups that found an entry.
    hits,
    /// All other look-ups; the next four say why, unless there simply was no entry.
    misses,
    /// Misses on a file that breaks a rule of the format.
    corrupt,
    /// Misses since somebody else could have written the file or directory.
    untrusted,
    /// Misses since the key finds an entry of another kind.
    other_kind,
    /// Misses since a system call failed.
    errors,
    /// Files moved aside to make the place of an entry free.
    set_aside,
    /// Entries published.
    published,
    /// Publications of what was there already.
    existed,
    /// Entries removed by eviction.
    evicted,
}

/// A store of entries below one directory.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    mac_key: Option<MacKey>,
    tree: RwLock<Option<Arc<Tree>>>,
    is_swept: AtomicBool,
    held: Held,
    counters: AtomicCounters,
}

impl Store {
    /// A store below `root`, which need not exist: it is made by the first publication.
    pub fn new(root: &Path) -> Result<Self, StoreError> {
        let root = std::path::absolute(root)
            .map_err(|error| StoreError::read(root, "make absolute", error))?;
        Ok(Self {
            root,
            mac_key: None,
            tree: RwLock::new(None),
            is_swept: AtomicBool::new(false),
            held: Held::new(),
            counters: AtomicCounters::default(),
        })
    }

    /// The store with a key: it signs what it publishes and takes only what is signed with it.
    #[must_use]
    pub fn with_mac_key(self, mac_key: MacKey) -> Self {
        Self {
            mac_key: Some(mac_key),
            ..self
        }
    }

    /// The root, absolute.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// What happened so far.
    pub fn counters(&self) -> Counters {
        self.counters.read()
    }

    /// The entry of `key` if this process holds it, with what `verify` names checked already.
    pub fn get_held(&self, kind: Kind, key: &Digest, verify: Verify<'_>) -> Option<Entry> {
        let entry = self.held.get(kind, key)?;
        if !entry.is_checked(verify) {
            return None;
        }
        self.counters.hits.fetch_add(1, Ordering::Relaxed);
        Some(entry)
    }

    /// Looks up the entry of `key`.
    pub fn get(&self, kind: Kind, key: &Digest, verify: Verify<'_>) -> Lookup {
        let count = |counter: &AtomicU64| {
            counter.fetch_add(1, Ordering::Relaxed);
        };
        if let Some(entry) = self.get_held(kind, key, verify) {
            return Lookup::Hit(entry);
        }
        let refused = match self.look_up(kind, key, verify) {
            Ok(Some(entry)) => {
                count(&self.counters.hits);
                self.held.insert(&entry);
                return Lookup::Hit(entry);
            }
            Ok(None) => {
                count(&self.counters.misses);
                return Lookup::Miss;
            }
            Err(refused) => refused,
        };
        count(&self.counters.misses);
        count(match &refused {
            StoreError::Corrupt { .. } => &self.counters.corrupt,
            StoreError::Untrusted { .. } => &self.counters.untrusted,
            StoreError::OtherKind { .. } => &self.counters.other_kind,
            _ => &self.counters.errors,
        });
        Lookup::Refused(refused)
    }

    /// Publishes an entry, complete and durable, unless a sound one is there already.
    pub fn put(
        &self,
        kind: Kind,
        key: &Digest,
        sections: &[(&str, &[u8])],
    ) -> Result<Published, StoreError> {
        let code = self
            .mac_key
            .as_ref()
            .map(|mac_key| mac_key.code(kind, key, sections.iter().copied()));
        let mut sections = sections.to_vec();
        sections.extend(code.as_ref().map(|code| (mac::SECTION, code.as_slice())));
        let entry = EntryWriter::new(kind, key, &sections)?;
        let mut problems = Vec::new();
        let mut named = false;
        let mut prepared: Option<Prepared> = None;
        for _ in 0..ATTEMPTS {
            let tree = self.tree_for_writing()?;
            if !self.is_swept.swap(true, Ordering::Relaxed) {
                publish::sweep(&tree);
            }
            if self.is_taken(&tree, kind, key, &mut problems)? {
                self.counters.existed.fetch_add(1, Ordering::Relaxed);
                return Ok(Published {
                    is_new: false,
                    problems,
                });
            }
            // Written once: a file without a name survives the removal of every directory.
            let written = match prepared.take() {
                None => Prepared::write(&tree, &entry, named)?,
                written => written,
            };
            let Some(mut file) = written else { continue };
            let Some(directory) = publish::open_inside(&tree, fan_out(&key.to_string()))? else {
                prepared = Some(file);
                continue;
            };
            let path = tree.entry_path(key);
            match file.link(&directory, &key.to_string(), &path)? {
                Link::Done => {
                    self.counters.published.fetch_add(1, Ordering::Relaxed);
                    if let Err(error) = tree.sync(key.as_bytes()[0], &directory) {
                        problems.push(StoreError::write(&path, "make the name durable", error));
                    }
                    return Ok(Published {
                        is_new: true,
                        problems,
                    });
                }
                Link::NeedsName => named = true,
                Link::Taken | Link::Vanished if !file.is_named() => prepared = Some(file),
                Link::Taken | Link::Vanished => {}
            }
        }
        let operation = "publish into a directory that keeps changing";
        Err(StoreError::write(&self.root, operation, Errno::NOENT))
    }

    /// Takes the entry of `key` away; false if there is none.
    ///
    /// For an entry that is sound but turned out to be of no use, so that a better one can take its
    /// place. Readers that hold it keep it.
    pub fn remove(&self, kind: Kind, key: &Digest) -> Result<bool, StoreError> {
        let Some(tree) = self.tree()? else {
            return Ok(false);
        };
        match lookup::open(&tree, kind, key, Verify::Sections(&[])) {
            Ok(None) => return Ok(false),
            Err(unfit) if matches!(unfit.error, StoreError::OtherKind { .. }) => {
                return Err(unfit.error);
            }
            Ok(Some(_)) | Err(_) => {}
        }
        self.held.remove(key);
        match unlinkat(&tree.directory, tree::relative_path(key), AtFlags::empty()) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(StoreError::write(&tree.entry_path(key), "remove", error)),
        }
    }

    /// The single-flight lock of `key`, not taken yet.
    pub fn lock(&self, key: &Digest) -> KeyLock {
        KeyLock::new(*key)
    }

    /// Lists the entries by their headers, in no order, and what could not be read.
    pub fn entries(&self) -> (Vec<EntryInfo>, Vec<StoreError>) {
        let (mut found, mut problems) = (Vec::new(), Vec::new());
        match self.tree() {
            Ok(None) => {}
            Ok(Some(tree)) => list::list(&tree, &mut found, &mut problems),
            Err(error) => problems.push(error),
        }
        (found, problems)
    }

    fn count_evicted(&self, is_removed: bool) {
        let count = u64::from(is_removed);
        self.counters.evicted.fetch_add(count, Ordering::Relaxed);
    }

    fn look_up(
        &self,
        kind: Kind,
        key: &Digest,
        verify: Verify<'_>,
    ) -> Result<Option<Entry>, StoreError> {
        let Some(mut tree) = self.tree()? else {
            return Ok(None);
        };
        let mut found = lookup::open(&tree, kind, key, verify);
        if matches!(found, Ok(None)) && tree.is_gone() {
            // The directory was removed; it may have been made again by another process.
            let Some(new_tree) = self.reopen(false)? else {
                return Ok(None);
            };
            tree = new_tree;
            found = lookup::open(&tree, kind, key, verify);
        }
        found.map_err(|unfit| {
            if matches!(unfit.error, StoreError::Corrupt { .. }) {
                // Where nothing can be written the file stays, and stays a miss.
                let _ = self.set_aside(&tree, key, &unfit);
            }
            unfit.error
        })
    }

    /// Whether a sound entry is in the place of `key`. What is none is set aside.
    fn is_taken(
        &self,
        tree: &Tree,
        kind: Kind,
        key: &Digest,
        problems: &mut Vec<StoreError>,
    ) -> Result<bool, StoreError> {
        let unfit = match lookup::open(tree, kind, key, Verify::All) {
            Ok(found) => {
                if found.is_some() {
                    // Whoever wants it now must not lose it to an eviction that runs.
                    last_use::note_use_now(tree, key);
                }
                return Ok(found.is_some());
            }
            Err(unfit) => unfit,
        };
        let is_fault_of_the_file = matches!(
            unfit.error,
            StoreError::Corrupt { .. } | StoreError::Untrusted { .. }
        );
        if !is_fault_of_the_file || unfit.found.is_none() {
            return Err(unfit.error);
        }
        self.set_aside(tree, key, &unfit)?;
        problems.push(unfit.error);
        Ok(false)
    }

    fn set_aside(&self, tree: &Tree, key: &Digest, unfit: &Unfit) -> Result<(), StoreError> {
        let Some(found) = unfit.found else {
            return Ok(());
        };
        let name = key.to_string();
        let moved = match &unfit.directory {
            Some(directory) => tree.set_aside(directory, &name, found),
            None => tree.set_aside(&tree.directory, fan_out(&name), found),
        };
        moved.map_err(|error| StoreError::write(&tree.entry_path(key), "set aside", error))?;
        self.counters.set_aside.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// The opened tree; None while there is none.
    fn tree(&self) -> Result<Option<Arc<Tree>>, StoreError> {
        let held = self.tree.try_read().ok().and_then(|held| held.clone());
        match held {
            Some(tree) => Ok(Some(tree)),
            None => self.reopen(false),
        }
    }

    /// The opened tree, made if need be.
    fn tree_for_writing(&self) -> Result<Arc<Tree>, StoreError> {
        if let Some(tree) = self.tree()?.filter(|tree| !tree.is_gone()) {
            return Ok(tree);
        }
        for _ in 0..ATTEMPTS {
            match self.reopen(true) {
                Ok(Some(tree)) => return Ok(tree),
                // Removed between two steps of its making.
                Err(StoreError::Io { source, .. })
                    if source.kind() == std::io::ErrorKind::NotFound => {}
                Ok(None) => {}
                Err(error) => return Err(error),
            }
        }
        Err(StoreError::write(
            &self.root,
            "make a directory that keeps being removed",
            Errno::NOENT,
        ))
    }

    fn reopen(&self, create: bool) -> Result<Option<Arc<Tree>>, StoreError> {
        let tree = Tree::open(&self.root, self.mac_key.clone(), create)?.map(Arc::new);
        if let Ok(mut held) = self.tree.try_write() {
            held.clone_from(&tree);
        }
        Ok(tree)
    }
}
