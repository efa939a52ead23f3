//! The opened directory of a store, and the only place that makes names in it.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{
    AtFlags, RenameFlags, Stat, Timespec, Timestamps, UTIME_NOW, fstat, fsync, renameat_with,
    statat, utimensat,
};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use super::error::StoreError;
use super::mac::MacKey;
use super::trust;
use crate::digest::Digest;
use crate::mmap;

/// Version of the directory layout.
const LAYOUT: &str = "v1";
/// Named temporary files.
pub(super) const TEMPORARY: &str = "tmp";
/// What was in the place of an entry and is not one.
pub(super) const ASIDE: &str = "aside";
/// Single-flight locks.
pub(super) const LOCKS: &str = "locks";

/// `<root>/v1`, checked and held open.
#[derive(Debug)]
pub(super) struct Tree {
    pub(super) directory: OwnedFd,
    pub(super) path: PathBuf,
    /// The key with which entries must be signed, if any.
    pub(super) mac_key: Option<MacKey>,
    /// Whether entries may be mapped here.
    pub(super) is_local: bool,
    /// The root, and directories above it in which this process made one.
    parents: Vec<OwnedFd>,
    /// Whether the names in `parents` are known to be durable.
    is_anchored: AtomicBool,
    /// Per fan-out directory: whether its name is known to be durable.
    is_durable: [AtomicBool; 256],
}

impl Tree {
    /// Opens the tree below `root`; None if there is none and it is not to be made.
    pub(super) fn open(
        root: &Path,
        mac_key: Option<MacKey>,
        create: bool,
    ) -> Result<Option<Self>, StoreError> {
        let mut parents = Vec::new();
        let Some(root_directory) = trust::open_root(root, create, &mut parents)? else {
            return Ok(None);
        };
        let directory = trust::open_directory(&root_directory, root, LAYOUT, create)?;
        parents.push(root_directory);
        Ok(directory.map(|directory| Self {
            mac_key,
            is_local: mmap::is_local(&directory),
            path: root.join(LAYOUT),
            directory,
            parents,
            is_anchored: AtomicBool::new(false),
            is_durable: [const { AtomicBool::new(false) }; 256],
        }))
    }

    /// Makes the name of a new entry durable, and those of the directories that it is in.
    ///
    /// After the entry got its name, not when a directory is made: synchronising takes time, in
    /// which somebody who wipes the store would always win.
    pub(super) fn sync(&self, fan_out: u8, directory: &OwnedFd) -> Result<(), Errno> {
        sync_directory(directory)?;
        if let Some(durable) = self.is_durable.get(usize::from(fan_out))
            && !durable.load(Ordering::Acquire)
        {
            sync_directory(&self.directory)?;
            durable.store(true, Ordering::Release);
        }
        if !self.is_anchored.load(Ordering::Acquire) {
            self.parents.iter().try_for_each(sync_directory)?;
            self.is_anchored.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Whether somebody removed the directory: names made in it now would be lost.
    pub(super) fn is_gone(&self) -> bool {
        is_gone(&self.directory)
    }

    /// Opens a directory inside the tree.
    pub(super) fn open_directory(
        &self,
        name: &str,
        create: bool,
    ) -> Result<Option<OwnedFd>, StoreError> {
        trust::open_directory(&self.directory, &self.path, name, create)
    }

    /// Where the entry of `key` is, for messages.
    pub(super) fn entry_path(&self, key: &Digest) -> PathBuf {
        self.path.join(relative_path(key))
    }

    /// Renames what is at `directory/name` into the tree's `aside`, to make the place free.
    ///
    /// `judged` is what was found unfit. Something else that has taken the place since is left or
    /// brought back, since it may be a good entry.
    pub(super) fn set_aside(
        &self,
        directory: &OwnedFd,
        name: &str,
        judged: FileId,
    ) -> Result<(), Errno> {
        match statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(()),
            Ok(found) if FileId::from(&found) != judged => return Ok(()),
            found => found?,
        };
        let aside = match self.open_directory(ASIDE, true) {
            Ok(Some(aside)) => aside,
            Ok(None) => return Err(Errno::NOENT),
            Err(StoreError::ReadOnly { source, .. } | StoreError::Io { source, .. }) => {
                return Err(Errno::from_io_error(&source).unwrap_or(Errno::IO));
            }
            Err(_) => return Err(Errno::ACCESS),
        };
        let kept = format!("{name}-{}", random_name()?);
        match renameat_with(directory, name, &aside, &kept, RenameFlags::empty()) {
            Err(Errno::NOENT) => return Ok(()),
            renamed => renamed?,
        }
        // From now on it ages; without the new time it only goes sooner.
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_NOW,
        };
        let times = Timestamps {
            last_access: now,
            last_modification: now,
        };
        let _ = utimensat(&aside, &kept, &times, AtFlags::SYMLINK_NOFOLLOW);
        let moved = statat(&aside, &kept, AtFlags::SYMLINK_NOFOLLOW)?;
        if FileId::from(&moved) != judged {
            match renameat_with(&aside, &kept, directory, name, RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) => {}
                restored => restored?,
            }
        }
        Ok(())
    }
}

/// Which file it is, whatever its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct FileId {
    device: u64,
    inode: u64,
}

impl From<&Stat> for FileId {
    fn from(found: &Stat) -> Self {
        Self {
            device: found.st_dev,
            inode: found.st_ino,
        }
    }
}

/// Makes the names in `directory` durable.
///
/// File systems that cannot synchronise a directory (some FUSE) are as durable as they are.
fn sync_directory(directory: &OwnedFd) -> Result<(), Errno> {
    match fsync(directory) {
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(()),
        synced => synced,
    }
}

/// The name of the directory of an entry or lock.
pub(super) fn fan_out(hex: &str) -> &str {
    hex.get(..2).unwrap_or(hex)
}

/// Where the entry of `key` is, from the tree's directory.
pub(super) fn relative_path(key: &Digest) -> String {
    let name = key.to_string();
    format!("{}/{name}", fan_out(&name))
}

/// Whether a directory has no name any more.
pub(super) fn is_gone(directory: impl AsFd) -> bool {
    fstat(directory).is_ok_and(|found| found.st_nlink == 0)
}

/// 128 random bits as hex: no two processes, in whatever namespace, choose the same name.
pub(super) fn random_name() -> Result<String, Errno> {
    let mut bytes = [0_u8; 16];
    let count = getrandom(&mut bytes, GetRandomFlags::empty())?;
    if count != bytes.len() {
        return Err(Errno::AGAIN);
    }
    Ok(format!("{:032x}", u128::from_le_bytes(bytes)))
}
