//! When an entry was last used: the later one of its file's access and modification times.
//!
//! A mount with `relatime` sets the access time once a day, one with `noatime` never. So a hit sets
//! it itself, where it may, when the time that is there is more than an hour off. Nothing else of
//! the file changes, and a reader that may not write is a reader all the same.

use std::os::fd::OwnedFd;
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, futimens, utimensat};

use super::tree::{Tree, relative_path};
use crate::digest::Digest;

/// How far off the time of the last use may be.
const RESOLUTION: Duration = Duration::from_hours(1);

/// When the file was published or last changed.
pub(super) fn modified(found: &Stat) -> SystemTime {
    time(found.st_mtime, found.st_mtime_nsec)
}

/// When the entry was last used; a time in the future, by a clock that was wrong, counts as `now`.
pub(super) fn last_use(found: &Stat, now: SystemTime) -> SystemTime {
    time(found.st_atime, found.st_atime_nsec)
        .max(modified(found))
        .min(now)
}

/// Notes the use of an entry, unless one was noted within the last hour.
pub(super) fn note_use(file: &OwnedFd, found: &Stat) {
    let now = SystemTime::now();
    let noted = time(found.st_atime, found.st_atime_nsec).max(modified(found));
    let off = now
        .duration_since(noted)
        .unwrap_or_else(|future| future.duration());
    if off > RESOLUTION {
        // Best effort: it is no reader's duty.
        let _ = futimens(file, &access_now());
    }
}

/// Notes the use of the entry of `key`, whatever was noted before; best effort.
pub(super) fn note_use_now(tree: &Tree, key: &Digest) {
    let relative = relative_path(key);
    let flags = AtFlags::SYMLINK_NOFOLLOW;
    let _ = utimensat(&tree.directory, relative, &access_now(), flags);
}

fn access_now() -> Timestamps {
    let at = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
    Timestamps {
        last_access: at(UTIME_NOW),
        last_modification: at(UTIME_OMIT),
    }
}

// The type of these fields differs between architectures.
#[allow(clippy::unnecessary_fallible_conversions, clippy::useless_conversion)]
fn time<S: TryInto<u64>, N: TryInto<u32>>(seconds: S, nanoseconds: N) -> SystemTime {
    let seconds = seconds.try_into().unwrap_or(0);
    let nanoseconds = nanoseconds.try_into().unwrap_or(0);
    SystemTime::UNIX_EPOCH
        .checked_add(Duration::new(seconds, nanoseconds))
        .unwrap_or(SystemTime::UNIX_EPOCH)
}
