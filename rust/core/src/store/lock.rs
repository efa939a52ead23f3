//! Single flight: one process does the work for a key, the others wait for it.

use std::io;
use std::time::SystemTime;

use rustix::fs::{
    AtFlags, FileType, FlockOperation, Mode, OFlags, flock, fstat, ftruncate, openat, statat,
    unlinkat,
};
use rustix::io::{Errno, pread, pwrite};
use rustix::process::getpid;
use serde::{Deserialize, Serialize};

use super::Store;
use super::error::StoreError;
use super::fork::{LockDescriptor, generation};
use super::publish::open_inside;
use super::tree::{FileId, LOCKS, Tree, fan_out};
use super::trust;
use crate::digest::Digest;

/// Most bytes of a holder's note that are read.
const MAX_NOTE_BYTES: usize = 4096;
/// How often the way to a lock is made anew when somebody keeps removing it.
const ATTEMPTS: usize = 16;

/// Who holds a lock; for the log line of those who wait.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Process id, in the holder's PID namespace.
    pub pid: i32,
    /// Host name of the holder, the container's in a container.
    pub host: String,
    /// Boot of the kernel that the holder runs on.
    pub boot_id: String,
    /// When the lock was taken, Unix time in seconds.
    pub time_s: u64,
    /// What the holder is doing.
    pub note: String,
}

/// The single-flight lock of one key. Freed by [`KeyLock::release`], by its drop and, by the kernel,
/// when its process dies.
#[derive(Debug)]
pub struct KeyLock {
    key: Digest,
    held: Option<Held>,
}

#[derive(Debug)]
struct Held {
    file: LockDescriptor,
    directory: std::os::fd::OwnedFd,
    generation: u32,
}

impl KeyLock {
    pub(super) fn new(key: Digest) -> Self {
        Self { key, held: None }
    }

    /// The key.
    pub fn key(&self) -> &Digest {
        &self.key
    }

    /// Whether this process holds the lock through this object; a forked child does not.
    pub fn is_held(&self) -> bool {
        self.held
            .as_ref()
            .is_some_and(|held| held.generation == generation())
    }

    /// Takes the lock if nobody has it. True if this object holds it now; false is worth another
    /// try.
    ///
    /// `note` says to those who wait what is being done.
    pub fn try_acquire(&mut self, store: &Store, note: &str) -> Result<bool, StoreError> {
        if self.is_held() {
            return Ok(true);
        }
        self.held = None;
        let name = self.key.to_string();
        for _ in 0..ATTEMPTS {
            let tree = store.tree_for_writing()?;
            match try_lock(&tree, &name)? {
                Attempt::Locked(held) => {
                    write_note(&held, note);
                    self.held = Some(held);
                    return Ok(true);
                }
                Attempt::Busy => return Ok(false),
                Attempt::Vanished => {}
            }
        }
        // Whoever removes it does not do so for ever: as if it were held.
        Ok(false)
    }

    /// Who holds the lock, as far as can be read.
    pub fn holder(&self, store: &Store) -> Option<Holder> {
        let tree = store.tree().ok()??;
        let name = self.key.to_string();
        let relative = format!("{LOCKS}/{}/{name}", fan_out(&name));
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = openat(&tree.directory, relative, flags, Mode::empty()).ok()?;
        if trust::file_type(&fstat(&file).ok()?) != FileType::RegularFile {
            return None;
        }
        let mut bytes = [0; MAX_NOTE_BYTES];
        let count = pread(&file, &mut bytes, 0).ok()?;
        serde_json::from_slice(bytes.get(..count)?).ok()
    }

    /// Frees the lock. Without effect if it is not held.
    ///
    /// The file goes first, while it is still locked: whoever waits on it finds that it has no name
    /// any more and goes to a new one.
    pub fn release(&mut self) {
        let Some(held) = self.held.take() else { return };
        if held.generation != generation() {
            return;
        }
        let name = self.key.to_string();
        if is_at(&held, &name) {
            // A lock file that stays is used again.
            let _ = unlinkat(&held.directory, &name, AtFlags::empty());
        }
        // Explicitly, not only by closing: a child that is between fork and exec has a copy.
        let _ = flock(&held.file, FlockOperation::Unlock);
    }
}

impl Drop for KeyLock {
    fn drop(&mut self) {
        self.release();
    }
}

enum Attempt {
    Locked(Held),
    Busy,
    Vanished,
}

fn try_lock(tree: &Tree, name: &str) -> Result<Attempt, StoreError> {
    let Some(locks) = open_inside(tree, LOCKS)? else {
        return Ok(Attempt::Vanished);
    };
    let locks_path = tree.path.join(LOCKS);
    let opened = trust::open_directory(&locks, &locks_path, fan_out(name), true);
    let directory = match opened {
        Ok(Some(directory)) => directory,
        Ok(None) => return Ok(Attempt::Vanished),
        Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Ok(Attempt::Vanished);
        }
        Err(error) => return Err(error),
    };
    let path = locks_path.join(fan_out(name)).join(name);
    let flags =
        OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match openat(&directory, name, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => LockDescriptor::new(file),
        Err(Errno::NOENT) => return Ok(Attempt::Vanished),
        Err(Errno::ISDIR | Errno::LOOP | Errno::NXIO) => return make_free(tree, &directory, name),
        Err(error) => return Err(StoreError::write(&path, "open the lock", error)),
    };
    let found = fstat(&file).map_err(|error| StoreError::read(&path, "stat", error))?;
    if trust::file_type(&found) != FileType::RegularFile {
        return make_free(tree, &directory, name);
    }
    trust::check_private("lock", &path, &found)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK | Errno::INTR) => return Ok(Attempt::Busy),
        Err(error) => return Err(StoreError::write(&path, "lock", error)),
    }
    let held = Held {
        file,
        directory,
        generation: generation(),
    };
    // The lock counts only if the next process that asks for it opens the same file.
    Ok(if is_at(&held, name) {
        Attempt::Locked(held)
    } else {
        Attempt::Vanished
    })
}

/// Sets aside something in the place of a lock that is not a regular file.
fn make_free(
    tree: &Tree,
    directory: &std::os::fd::OwnedFd,
    name: &str,
) -> Result<Attempt, StoreError> {
    let path = tree.path.join(LOCKS).join(fan_out(name)).join(name);
    match statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => {}
        Err(error) => return Err(StoreError::read(&path, "stat", error)),
        Ok(found) => tree
            .set_aside(directory, name, FileId::from(&found))
            .map_err(|error| StoreError::write(&path, "set aside", error))?,
    }
    Ok(Attempt::Vanished)
}

fn is_at(held: &Held, name: &str) -> bool {
    let named = statat(&held.directory, name, AtFlags::SYMLINK_NOFOLLOW);
    match (named, fstat(&held.file)) {
        (Ok(named), Ok(own)) => (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino),
        _ => false,
    }
}

/// Tells those who wait who works. A note that cannot be written is only missing from a log line.
fn write_note(held: &Held, note: &str) {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let holder = Holder {
        pid: getpid().as_raw_nonzero().get(),
        host: rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned(),
        boot_id: read_boot_id().unwrap_or_default(),
        time_s: since.map_or(0, |elapsed| elapsed.as_secs()),
        note: note.chars().take(MAX_NOTE_BYTES / 8).collect(),
    };
    if let Ok(json) = serde_json::to_vec(&holder) {
        let _ = ftruncate(&held.file, 0);
        let _ = pwrite(&held.file, &json, 0);
    }
}

fn read_boot_id() -> Option<String> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let path = "/proc/sys/kernel/random/boot_id";
    let file = openat(rustix::fs::CWD, path, flags, Mode::empty()).ok()?;
    let mut bytes = [0; 64];
    let count = pread(&file, &mut bytes, 0).ok()?;
    Some(str::from_utf8(bytes.get(..count)?).ok()?.trim().to_owned())
}
