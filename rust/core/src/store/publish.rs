//! Publish: an unnamed file becomes an entry in one step, complete and durable.

use std::io::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, SystemTime};

use rustix::fs::{
    AtFlags, CWD, Dir, FallocateFlags, Mode, OFlags, RenameFlags, fallocate, fchmod, fdatasync,
    ftruncate, linkat, openat, renameat_with, statat, unlinkat,
};
use rustix::io::{Errno, pwrite};

use super::error::StoreError;
use super::tree::{ASIDE, TEMPORARY, Tree, is_gone, random_name};
use crate::entry::EntryWriter;

/// Mode of an entry: nobody, not even its owner, writes to it by accident.
const ENTRY_MODE: Mode = Mode::RUSR;
/// Age at which a named temporary file belongs to a writer that is dead.
pub(super) const TEMPORARY_AGE: Duration = Duration::from_hours(24);
/// How long what was set aside is kept for a look at it.
const ASIDE_AGE: Duration = Duration::from_hours(7 * 24);

/// A complete, durable file that has no name among the entries yet.
#[derive(Debug)]
pub(super) struct Prepared {
    file: OwnedFd,
    /// Directory and name of a file that could not be made without one.
    name: Option<(OwnedFd, String)>,
}

/// What became of an attempt to give a file its name.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Link {
    /// The entry is published.
    Done,
    /// The name is taken.
    Taken,
    /// A directory, or the named temporary file, was removed by somebody else.
    Vanished,
    /// An unnamed file cannot be named here (no `/proc`).
    NeedsName,
}

impl Drop for Prepared {
    fn drop(&mut self) {
        if let Some((directory, name)) = &self.name {
            // What cannot be removed now is swept later.
            let _ = unlinkat(directory, name, AtFlags::empty());
        }
    }
}

impl Prepared {
    /// Writes all of `entry` to a file without a name, or with a temporary one if `named` or if
    /// the file system has no others. None if the tree was removed by somebody else.
    pub(super) fn write(
        tree: &Tree,
        entry: &EntryWriter<'_>,
        named: bool,
    ) -> Result<Option<Self>, StoreError> {
        let failed = |operation| move |error| StoreError::write(&tree.path, operation, error);
        let Some(prepared) = Self::create(tree, named)? else {
            return Ok(None);
        };
        let file = &prepared.file;
        match fallocate(file, FallocateFlags::empty(), 0, entry.total_bytes()) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
                ftruncate(file, entry.total_bytes()).map_err(failed("extend a file"))?;
            }
            allocated => allocated.map_err(failed("reserve space"))?,
        }
        for (offset, bytes) in entry.parts() {
            write_all(file, bytes, offset).map_err(failed("write"))?;
        }
        fchmod(file, ENTRY_MODE).map_err(failed("set the mode"))?;
        fdatasync(file).map_err(failed("synchronise"))?;
        Ok(Some(prepared))
    }

    fn create(tree: &Tree, named: bool) -> Result<Option<Self>, StoreError> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let failed = |error| StoreError::write(&tree.path, "make a file", error);
        if !named {
            match openat(&tree.directory, ".", flags | OFlags::TMPFILE, mode) {
                Ok(file) => return Ok(Some(Self { file, name: None })),
                // Not every file system has unnamed files; old kernels see a directory instead.
                // Not only NOENT: ext4 says PERM in a directory that was removed.
                Err(_) if tree.is_gone() => return Ok(None),
                Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {}
                Err(error) => return Err(failed(error)),
            }
        }
        let Some(directory) = open_inside(tree, TEMPORARY)? else {
            return Ok(None);
        };
        let name = random_name().map_err(failed)?;
        let flags = flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        match openat(&directory, &name, flags, mode) {
            Ok(file) => Ok(Some(Self {
                file,
                name: Some((directory, name)),
            })),
            Err(_) if is_gone(&directory) => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }

    /// Whether the file has a temporary name, which somebody may have removed.
    pub(super) fn is_named(&self) -> bool {
        self.name.is_some()
    }

    /// Gives the file the name `directory/name`, unless that is taken.
    pub(super) fn link(
        &mut self,
        directory: &OwnedFd,
        name: &str,
        path: &Path,
    ) -> Result<Link, StoreError> {
        let linked = match &self.name {
            None => link_unnamed(&self.file, directory, name),
            Some((temporary, old)) => {
                match linkat(temporary, old, directory, name, AtFlags::empty()) {
                    // No hard links here. The rename takes the temporary name away.
                    Err(Errno::PERM | Errno::OPNOTSUPP | Errno::MLINK | Errno::NOSYS) => {
                        renameat_with(temporary, old, directory, name, RenameFlags::NOREPLACE)
                    }
                    linked => linked,
                }
            }
        };
        match linked {
            Ok(()) => Ok(Link::Done),
            Err(Errno::EXIST) => Ok(Link::Taken),
            Err(_) if is_gone(directory) => Ok(Link::Vanished),
            Err(Errno::NOENT) if self.name.is_none() => Ok(Link::NeedsName),
            Err(Errno::NOENT) => Ok(Link::Vanished),
            Err(error) => Err(StoreError::write(path, "publish", error)),
        }
    }
}

/// Opens or makes a directory of the tree; None if the tree was removed meanwhile.
pub(super) fn open_inside(tree: &Tree, name: &str) -> Result<Option<OwnedFd>, StoreError> {
    match tree.open_directory(name, true) {
        Err(_) if tree.is_gone() => Ok(None),
        // Removed between its making and its opening.
        Err(StoreError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        opened => opened,
    }
}

/// Removes what dead writers left and what was set aside long ago. Failures are left for next time.
pub(super) fn sweep(tree: &Tree) {
    for (name, age) in [(TEMPORARY, TEMPORARY_AGE), (ASIDE, ASIDE_AGE)] {
        let Ok(Some(directory)) = tree.open_directory(name, false) else {
            continue;
        };
        let Ok(listing) = Dir::read_from(&directory) else {
            continue;
        };
        for file in listing.filter_map(Result::ok) {
            let Ok(found) = statat(&directory, file.file_name(), AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            let changed = Duration::from_secs(u64::try_from(found.st_mtime).unwrap_or(0));
            let elapsed = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH + changed);
            if elapsed.is_ok_and(|elapsed| elapsed > age) {
                // Directories stay: the store makes none here.
                let _ = unlinkat(&directory, file.file_name(), AtFlags::empty());
            }
        }
    }
}

fn link_unnamed(file: &OwnedFd, directory: &OwnedFd, name: &str) -> Result<(), Errno> {
    match linkat(file, "", directory, name, AtFlags::EMPTY_PATH) {
        // Older kernels ask for CAP_DAC_READ_SEARCH and say NOENT without it.
        Err(Errno::NOENT | Errno::INVAL | Errno::PERM) => {
            let link = format!("/proc/self/fd/{}", file.as_raw_fd());
            linkat(CWD, link, directory, name, AtFlags::SYMLINK_FOLLOW)
        }
        linked => linked,
    }
}

fn write_all(file: &OwnedFd, mut bytes: &[u8], mut offset: u64) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match pwrite(file, bytes, offset) {
            Ok(0) => return Err(Errno::IO),
            Ok(count) => {
                bytes = bytes.get(count..).unwrap_or_default();
                offset = offset.saturating_add(count as u64);
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
