//! Who could have written a file or directory: ownership and modes, checked from `/` down.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, Stat, fstat, mkdirat, openat, readlinkat, statat,
};
use rustix::io::Errno;
use rustix::process::{getegid, geteuid, getgroups};

use super::error::{StoreError, file_type_name};

/// Flags to open a directory that will be read and synchronised.
const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);
/// Flags to hold a directory without needing the right to read it.
const PASSAGE: OFlags = OFlags::PATH
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);
/// Most symbolic links followed on the way to the root. Source: Linux `MAXSYMLINKS`.
const MAX_LINKS: usize = 40;

/// Mode of every directory the store makes.
const PRIVATE_DIRECTORY: Mode = Mode::RWXU;

/// Opens the root of a store, having checked it and each ancestor.
///
/// Missing directories are made with mode 0700 if `create`; otherwise a missing root is None. The
/// walk holds a descriptor at each step, so what is checked is what is opened. Directories in which
/// one was made are added to `changed`: the caller makes the new names durable.
pub(super) fn open_root(
    root: &Path,
    create: bool,
    changed: &mut Vec<OwnedFd>,
) -> Result<Option<OwnedFd>, StoreError> {
    let mut here = PathBuf::from("/");
    let mut directory = openat(CWD, "/", PASSAGE, Mode::empty())
        .map_err(|error| StoreError::read(&here, "open", error))?;
    check_ancestor(&here, &stat(&directory, &here)?)?;
    let mut pending = names(root);
    let mut links = 0;
    while let Some(name) = pending.pop_front() {
        let is_root = pending.is_empty();
        let path = join(&here, &name);
        let read = |error| StoreError::read(&path, "open", error);
        let found = match statat(&directory, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) if create => {
                make_directory(&directory, &here, &name)?;
                // Opened anew: `directory` is held by a descriptor that cannot be synchronised.
                changed.extend(openat(&directory, ".", DIRECTORY, Mode::empty()));
                statat(&directory, &name, AtFlags::SYMLINK_NOFOLLOW)
            }
            other => other,
        };
        let found = match found {
            Err(Errno::NOENT | Errno::NOTDIR) if !create => return Ok(None),
            other => other.map_err(read)?,
        };
        if FileType::from_raw_mode(found.st_mode) == FileType::Symlink {
            if is_root {
                let reason = "the cache directory is a symbolic link".to_owned();
                return Err(StoreError::Untrusted { path, reason });
            }
            check_owner(&path, "symbolic link", &found)?;
            links += 1;
            if links > MAX_LINKS {
                return Err(read(Errno::LOOP));
            }
            let target = read_link(&directory, &name).map_err(read)?;
            if target.is_absolute() {
                here = PathBuf::from("/");
                directory = openat(CWD, "/", PASSAGE, Mode::empty()).map_err(read)?;
            }
            for name in names(&target).into_iter().rev() {
                pending.push_front(name);
            }
            continue;
        }
        let flags = if is_root { DIRECTORY } else { PASSAGE };
        let next = match openat(&directory, &name, flags, Mode::empty()) {
            Err(Errno::NOENT) if !create => return Ok(None),
            other => other.map_err(read)?,
        };
        let opened = stat(&next, &path)?;
        if is_root {
            check_private("cache directory", &path, &opened)?;
            return Ok(Some(next));
        }
        check_ancestor(&path, &opened)?;
        directory = next;
        here = path;
    }
    let reason = "the root of the file system cannot be a cache directory".to_owned();
    Err(StoreError::Untrusted {
        path: root.to_owned(),
        reason,
    })
}

/// Opens the directory `name` inside the trusted directory `parent` and checks that it is private.
///
/// A missing one is made if `create`, else None.
pub(super) fn open_directory(
    parent: &OwnedFd,
    parent_path: &Path,
    name: &str,
    create: bool,
) -> Result<Option<OwnedFd>, StoreError> {
    let path = parent_path.join(name);
    let opened = match openat(parent, name, DIRECTORY, Mode::empty()) {
        Err(Errno::NOENT) if create => {
            make_directory(parent, parent_path, OsStr::new(name))?;
            openat(parent, name, DIRECTORY, Mode::empty())
        }
        other => other,
    };
    match opened {
        Ok(directory) => {
            check_private("directory", &path, &stat(&directory, &path)?)?;
            Ok(Some(directory))
        }
        Err(Errno::NOENT) if !create => Ok(None),
        Err(Errno::NOTDIR | Errno::LOOP) => {
            let found = statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)
                .map_err(|error| StoreError::read(&path, "stat", error))?;
            let found = FileType::from_raw_mode(found.st_mode);
            Err(StoreError::wrong_type(&path, "directory", found))
        }
        Err(error) => Err(StoreError::read(&path, "open", error)),
    }
}

/// Whether [`check_private`] has nothing to say.
pub(super) fn is_private(found: &Stat) -> bool {
    is_trusted_owner(found) && found.st_mode & 0o022 == 0
}

/// Checks that only this user and root can write to something inside the store.
pub(super) fn check_private(what: &str, path: &Path, found: &Stat) -> Result<(), StoreError> {
    check_owner(path, what, found)?;
    if found.st_mode & 0o022 != 0 {
        let mode = found.st_mode & 0o7777;
        let reason = format!("the {what} is writable by group or others (mode {mode:04o})");
        return Err(StoreError::Untrusted {
            path: path.to_owned(),
            reason,
        });
    }
    Ok(())
}

/// The type of what `found` describes.
pub(super) fn file_type(found: &Stat) -> FileType {
    FileType::from_raw_mode(found.st_mode)
}

fn is_trusted_owner(found: &Stat) -> bool {
    found.st_uid == 0 || found.st_uid == geteuid().as_raw()
}

fn check_owner(path: &Path, what: &str, found: &Stat) -> Result<(), StoreError> {
    if is_trusted_owner(found) {
        return Ok(());
    }
    let user = geteuid().as_raw();
    let reason = format!(
        "the {what} is owned by user {}, expected user {user} or root",
        found.st_uid
    );
    Err(StoreError::Untrusted {
        path: path.to_owned(),
        reason,
    })
}

/// Checks a directory above the root: nobody else may be able to put another root in its place.
fn check_ancestor(path: &Path, found: &Stat) -> Result<(), StoreError> {
    if file_type(found) != FileType::Directory {
        let reason = format!(
            "a {} is above the cache directory",
            file_type_name(file_type(found))
        );
        return Err(StoreError::Untrusted {
            path: path.to_owned(),
            reason,
        });
    }
    check_owner(path, "directory above the cache directory", found)?;
    let is_sticky = found.st_mode & 0o1000 != 0;
    let by_others = found.st_mode & 0o002 != 0;
    let by_group = found.st_mode & 0o020 != 0 && !is_own_group(found.st_gid);
    if is_sticky || !(by_others || by_group) {
        return Ok(());
    }
    let mode = found.st_mode & 0o7777;
    let reason = format!(
        "the directory above the cache directory is writable by {} without the sticky bit (mode \
         {mode:04o})",
        if by_others {
            "others"
        } else {
            "a foreign group"
        }
    );
    Err(StoreError::Untrusted {
        path: path.to_owned(),
        reason,
    })
}

fn is_own_group(group: u32) -> bool {
    getegid().as_raw() == group
        || getgroups().is_ok_and(|groups| groups.iter().any(|own| own.as_raw() == group))
}

/// Makes a private directory. One that is there already is fine.
fn make_directory(parent: &OwnedFd, path: &Path, name: &OsStr) -> Result<(), StoreError> {
    match mkdirat(parent, name, PRIVATE_DIRECTORY) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(StoreError::write(
            &join(path, name),
            "make a directory",
            error,
        )),
    }
}

fn stat(fd: &OwnedFd, path: &Path) -> Result<Stat, StoreError> {
    fstat(fd).map_err(|error| StoreError::read(path, "stat", error))
}

fn read_link(directory: &OwnedFd, name: &OsStr) -> Result<PathBuf, Errno> {
    let target = readlinkat(directory, name, Vec::new())?;
    Ok(PathBuf::from(OsString::from_vec(target.into_bytes())))
}

/// The names on the way along `path`; `..` is one, as the kernel sees it.
fn names(path: &Path) -> VecDeque<OsString> {
    path.components()
        .filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some(OsString::from("..")),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
        })
        .collect()
}

/// `directory/name` for messages, with `..` resolved.
fn join(directory: &Path, name: &OsStr) -> PathBuf {
    if name.as_bytes() == b".." {
        return directory.parent().unwrap_or(directory).to_owned();
    }
    directory.join(name)
}
