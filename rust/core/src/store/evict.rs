//! Eviction: the entries that were not used for longest go, until the rest fits.
//!
//! `docs/entry-format.md`, "Eviction". No lock: several evictors at once remove the same entries,
//! since each begins with those that were used last the longest time ago.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, Stat, statat, unlinkat};
use rustix::io::Errno;

use super::error::StoreError;
use super::tree::{FileId, LOCKS, Tree, relative_path};
use super::{Store, last_use, list, publish};
use crate::digest::Digest;

/// What may stay.
#[derive(Debug, Clone, Copy)]
pub struct EvictionLimits {
    /// Most bytes that all entries together may have; None is no limit.
    pub max_size_bytes: Option<u64>,
    /// Longest time since the last use; None is no limit.
    pub max_age: Option<Duration>,
    /// Entries used within this time stay, whatever the limits are.
    pub min_age: Duration,
    /// Only tell what would be removed.
    pub is_dry_run: bool,
}

/// An entry that was removed.
#[derive(Debug, Clone)]
pub struct EvictedEntry {
    /// Its key.
    pub key: Digest,
    /// Where it was.
    pub path: PathBuf,
    /// Length of the file.
    pub size_bytes: u64,
    /// When it was last used.
    pub last_use: SystemTime,
}

/// What an eviction did.
#[derive(Debug, Default)]
pub struct Eviction {
    /// What was removed, or would be.
    pub removed: Vec<EvictedEntry>,
    /// How many entries stay.
    pub kept: u64,
    /// Bytes of those that stay.
    pub kept_bytes: u64,
    /// What could not be listed or removed.
    pub problems: Vec<StoreError>,
}

/// A file in the place of an entry.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    key: Digest,
    file: FileId,
    size_bytes: u64,
    last_use: SystemTime,
}

impl Store {
    /// Removes entries until the rest keeps `limits`. Readers that hold one keep it.
    ///
    /// Takes linear time in the number of entries. Fails if the directory takes no removal at all.
    pub fn evict(&self, limits: EvictionLimits) -> Result<Eviction, StoreError> {
        let mut eviction = Eviction::default();
        let Some(tree) = self.tree()? else {
            return Ok(eviction);
        };
        if !limits.is_dry_run {
            publish::sweep(&tree);
            self.sweep_locks(&tree, &mut eviction.problems);
        }
        let now = SystemTime::now();
        let mut files: Vec<Candidate> = list::list_files(&tree, &mut eviction.problems)
            .iter()
            .map(|(key, found)| Candidate::new(key, found, now))
            .collect();
        let total_bytes = sum(&files);
        let removable = choose(&mut files, limits, now, total_bytes);
        eviction.kept_bytes = total_bytes;
        eviction.kept = files.len() as u64;
        for candidate in files.iter().take(removable) {
            if limits.is_dry_run || self.evict_one(&tree, candidate, &mut eviction.problems)? {
                eviction.kept = eviction.kept.saturating_sub(1);
                eviction.kept_bytes = eviction.kept_bytes.saturating_sub(candidate.size_bytes);
                eviction.removed.push(EvictedEntry {
                    key: candidate.key,
                    path: tree.entry_path(&candidate.key),
                    size_bytes: candidate.size_bytes,
                    last_use: candidate.last_use,
                });
            }
        }
        Ok(eviction)
    }

    /// Whether the file was removed by this call.
    fn evict_one(
        &self,
        tree: &Tree,
        candidate: &Candidate,
        problems: &mut Vec<StoreError>,
    ) -> Result<bool, StoreError> {
        let relative = relative_path(&candidate.key);
        let removed =
            statat(&tree.directory, &relative, AtFlags::SYMLINK_NOFOLLOW).and_then(|found| {
                // Another file has the name, or this one was used since: it is young.
                let same = Candidate::new(&candidate.key, &found, SystemTime::now());
                if same.file != candidate.file || same.last_use > candidate.last_use {
                    return Ok(false);
                }
                self.held.remove(&candidate.key);
                unlinkat(&tree.directory, &relative, AtFlags::empty()).map(|()| true)
            });
        match removed {
            Ok(is_removed) => {
                self.count_evicted(is_removed);
                Ok(is_removed)
            }
            Err(Errno::NOENT) => Ok(false),
            Err(error) => {
                let path = tree.entry_path(&candidate.key);
                match StoreError::write(&path, "remove", error) {
                    error @ StoreError::ReadOnly { .. } => Err(error),
                    error => {
                        problems.push(error);
                        Ok(false)
                    }
                }
            }
        }
    }

    /// Removes lock files that killed holders left more than a day ago.
    fn sweep_locks(&self, tree: &Tree, problems: &mut Vec<StoreError>) {
        for fan_out in list::names(tree, LOCKS, problems) {
            if fan_out.starts_with('.') {
                continue;
            }
            for name in list::names(tree, &format!("{LOCKS}/{fan_out}"), problems) {
                let Ok(key) = name.parse::<Digest>() else {
                    continue;
                };
                let relative = format!("{LOCKS}/{fan_out}/{name}");
                let found = statat(&tree.directory, relative, AtFlags::SYMLINK_NOFOLLOW);
                let is_old = found.is_ok_and(|found| {
                    let elapsed = SystemTime::now().duration_since(last_use::modified(&found));
                    elapsed.is_ok_and(|elapsed| elapsed > publish::TEMPORARY_AGE)
                });
                if is_old {
                    // Held ones are left; releasing removes the file.
                    let _ = self.lock(&key).try_acquire(self, "remove an old lock file");
                }
            }
        }
    }
}

impl Candidate {
    fn new(key: &Digest, found: &Stat, now: SystemTime) -> Self {
        Self {
            key: *key,
            file: FileId::from(found),
            size_bytes: u64::try_from(found.st_size).unwrap_or(0),
            last_use: last_use::last_use(found, now),
        }
    }
}

/// Moves what is to go to the front and returns how many that are.
fn choose(
    files: &mut [Candidate],
    limits: EvictionLimits,
    now: SystemTime,
    total_bytes: u64,
) -> usize {
    let age = |file: &Candidate| now.duration_since(file.last_use).unwrap_or_default();
    let old = partition(files, |file| age(file) >= limits.min_age);
    let files = files.get_mut(..old).unwrap_or_default();
    let expired = partition(files, |file| {
        limits.max_age.is_some_and(|limit| age(file) > limit)
    });
    let (gone, rest) = files.split_at_mut(expired);
    let left = total_bytes.saturating_sub(sum(gone));
    let excess = limits
        .max_size_bytes
        .map_or(0, |limit| left.saturating_sub(limit));
    expired.saturating_add(oldest(rest, excess))
}

/// Moves those that `is_first` to the front and returns how many they are.
fn partition(files: &mut [Candidate], is_first: impl Fn(&Candidate) -> bool) -> usize {
    let mut count = 0;
    for index in 0..files.len() {
        if files.get(index).is_some_and(&is_first) {
            files.swap(index, count);
            count = count.saturating_add(1);
        }
    }
    count
}

/// Moves those used longest ago to the front, as few as have `excess` bytes, and returns how many.
///
/// Halves by selection instead of sorting: linear time.
fn oldest(files: &mut [Candidate], excess: u64) -> usize {
    let mut before = 0_usize;
    let mut files = files;
    let mut excess = excess;
    while excess > 0 && !files.is_empty() {
        let middle = files.len() / 2;
        files.select_nth_unstable_by_key(middle, |file| (file.last_use, file.key));
        // With one file left, `middle` is 0: it goes whole.
        let (older, younger) = files.split_at_mut(middle.max(1));
        let older_bytes = sum(older);
        if older_bytes >= excess && older.len() > 1 {
            files = older;
        } else {
            excess = excess.saturating_sub(older_bytes);
            before = before.saturating_add(older.len());
            files = younger;
        }
    }
    before
}

fn sum(files: &[Candidate]) -> u64 {
    files
        .iter()
        .fold(0, |sum, file| sum.saturating_add(file.size_bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn candidate((number, (last_use, size_bytes)): (usize, (u64, u64))) -> Candidate {
        Candidate {
            key: Digest::of(&number.to_le_bytes()),
            file: FileId::default(),
            size_bytes,
            last_use: SystemTime::UNIX_EPOCH + Duration::from_secs(last_use),
        }
    }

    #[test]
    fn what_has_no_bytes_does_not_go_with_the_last_that_has_to() {
        let sizes = [8, 8, 0, 0, 0, 0, 0, 0];
        let ages = (0_u64..).zip(sizes).enumerate().map(candidate);
        assert_eq!(oldest(&mut ages.collect::<Vec<_>>(), 16), 2);
    }

    proptest! {
        #[test]
        fn selection_removes_what_sorting_would(
            files in prop::collection::vec((0_u64..20, 0_u64..50), 0..60),
            excess in 0_u64..1500,
        ) {
            let mut files: Vec<Candidate> = files.into_iter().enumerate().map(candidate).collect();
            let mut sorted = files.clone();
            sorted.sort_by_key(|file| (file.last_use, file.key));
            let (mut expected, mut bytes) = (0, 0);
            while bytes < excess && expected < sorted.len() {
                bytes += sorted[expected].size_bytes;
                expected += 1;
            }
            let count = oldest(&mut files, excess);
            prop_assert_eq!(count, expected);
            let keys = |files: &[Candidate]| {
                let mut keys: Vec<Digest> = files.iter().map(|file| file.key).collect();
                keys.sort();
                keys
            };
            prop_assert_eq!(keys(&files[..count]), keys(&sorted[..count]));
        }
    }
}
