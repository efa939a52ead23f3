//! Look up: open, check and map one entry.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::SystemTime;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, fstat, openat, statat};
use rustix::io::Errno;

use super::error::StoreError;
use super::tree::{FileId, Tree, fan_out, relative_path};
use super::{last_use, trust};
use crate::digest::Digest;
use crate::entry::layout::PAGE_BYTES;
use crate::entry::{EntryLayout, FormatError, Kind, SectionRow};
use crate::mmap::Mapping;

/// Length from which a file is mapped: below, two page faults cost more than a read.
const MAP_FROM_BYTES: usize = 16 * PAGE_BYTES;

/// Which sections a look-up checks.
#[derive(Debug, Clone, Copy)]
pub enum Verify<'a> {
    /// All of them.
    All,
    /// Those with these names, if they are there; the others when they are first asked for.
    Sections(&'a [&'a str]),
}

impl Verify<'_> {
    fn includes(self, section: &SectionRow) -> bool {
        match self {
            Self::All => true,
            Self::Sections(names) => names.contains(&section.name.as_str()),
        }
    }
}

/// One entry, held: its bytes stay as they are even when the file is removed.
#[derive(Debug, Clone)]
pub struct Entry(Arc<Content>);

/// What an entry and the bytes of its sections share.
#[derive(Debug)]
pub(super) struct Content {
    mapping: Mapping,
    layout: EntryLayout,
    path: PathBuf,
    /// Per section of `layout`: whether its checksum was compared.
    checked: Box<[AtomicBool]>,
}

/// The bytes of one section; keeps the entry alive.
#[derive(Debug, Clone)]
pub struct SectionBytes {
    content: Arc<Content>,
    range: std::ops::Range<usize>,
}

impl AsRef<[u8]> for SectionBytes {
    fn as_ref(&self) -> &[u8] {
        // In range: `EntryLayout::check_section` has read it.
        self.content
            .mapping
            .as_ref()
            .get(self.range.clone())
            .unwrap_or_default()
    }
}

/// What a listing tells of an entry, from its header.
#[derive(Debug, Clone)]
pub struct EntryInfo {
    /// Kind, key, length and sections.
    pub layout: EntryLayout,
    /// The file.
    pub path: PathBuf,
    /// When it was published.
    pub modified: SystemTime,
    /// When it was last used, to within an hour.
    pub last_use: SystemTime,
}

impl Entry {
    /// What the entry holds.
    pub fn kind(&self) -> Kind {
        self.0.layout.kind
    }

    /// The key that it was published under.
    pub fn key(&self) -> &Digest {
        &self.0.layout.key
    }

    /// Where the file was.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Length of the file.
    pub fn size_bytes(&self) -> u64 {
        self.0.layout.total_bytes
    }

    /// The sections in file order.
    pub fn sections(&self) -> &[SectionRow] {
        &self.0.layout.sections
    }

    /// The content of a section, whose checksum is compared when it is first asked for.
    ///
    /// None if there is none of that name.
    pub fn section(&self, name: &str) -> Result<Option<SectionBytes>, StoreError> {
        let named = |(section, _): &(&SectionRow, &AtomicBool)| section.name == name;
        let Some((section, checked)) = self
            .0
            .layout
            .sections
            .iter()
            .zip(&self.0.checked)
            .find(named)
        else {
            return Ok(None);
        };
        if !checked.load(Ordering::Acquire) {
            EntryLayout::check_section(self.0.mapping.as_ref(), section).map_err(|source| {
                StoreError::Corrupt {
                    path: self.0.path.clone(),
                    source,
                }
            })?;
            checked.store(true, Ordering::Release);
        }
        Ok(Some(SectionBytes {
            content: Arc::clone(&self.0),
            range: section.range.clone(),
        }))
    }

    /// Compares the checksums of the sections that `verify` names, where that was not done yet.
    pub(super) fn check(&self, verify: Verify<'_>) -> Result<(), StoreError> {
        for section in self.sections() {
            if verify.includes(section) {
                self.section(&section.name)?;
            }
        }
        Ok(())
    }

    /// Whether [`Entry::check`] would have nothing to do.
    pub(super) fn is_checked(&self, verify: Verify<'_>) -> bool {
        let mut sections = self.sections().iter().zip(&self.0.checked);
        sections
            .all(|(section, checked)| !verify.includes(section) || checked.load(Ordering::Acquire))
    }

    pub(super) fn downgrade(&self) -> Weak<Content> {
        Arc::downgrade(&self.0)
    }

    pub(super) fn upgrade(content: &Weak<Content>) -> Option<Self> {
        content.upgrade().map(Self)
    }
}

/// An unfit file in the place of an entry: why, and what it was, to set aside just that.
pub(super) struct Unfit {
    pub(super) error: StoreError,
    pub(super) found: Option<FileId>,
    /// The fan-out directory that it is in, if that is a directory.
    pub(super) directory: Option<OwnedFd>,
}

impl Unfit {
    // An error of this size is boxed where it is made.
    #[allow(clippy::unnecessary_box_returns)]
    fn new(error: StoreError, found: Option<&Stat>) -> Box<Self> {
        Box::new(Self {
            error,
            found: found.map(FileId::from),
            directory: None,
        })
    }

    fn is_not_permitted(&self) -> bool {
        matches!(&self.error, StoreError::Io { source, .. }
            if Errno::from_io_error(source) == Some(Errno::PERM))
    }
}

/// Opens and checks the entry of `key`; None if there is none.
pub(super) fn open(
    tree: &Tree,
    kind: Kind,
    key: &Digest,
    verify: Verify<'_>,
) -> Result<Option<Entry>, Box<Unfit>> {
    let relative = relative_path(key);
    if !check_fan_out(tree, fan_out(&relative))? {
        return Ok(None);
    }
    let path = tree.path.join(&relative);
    let opened = open_file(tree, &relative, &path, OFlags::empty()).and_then(|opened| {
        let Some((file, found)) = opened else {
            return Ok(None);
        };
        read_entry(tree, &file, &found, &path, verify)
            .and_then(|entry| check_asked(&entry, kind, key).map(|()| Some(entry)))
            .inspect(|_| last_use::note_use(&file, &found))
            .map_err(|error| Unfit::new(error, Some(&found)))
    });
    opened.map_err(|mut unfit| {
        // Opened only now, since a sound entry needs no descriptor of its directory.
        unfit.directory = tree
            .open_directory(fan_out(&relative), false)
            .ok()
            .flatten();
        unfit
    })
}

/// Reads the header of a file of the tree, for a listing; None if it is gone.
pub(super) fn read_info(tree: &Tree, key: &Digest) -> Result<Option<EntryInfo>, StoreError> {
    let path = tree.entry_path(key);
    let relative = relative_path(key);
    // A listing is no use. Only the owner may ask for that.
    let opened = match open_file(tree, &relative, &path, OFlags::NOATIME) {
        Err(unfit) if unfit.is_not_permitted() => {
            open_file(tree, &relative, &path, OFlags::empty())
        }
        opened => opened,
    };
    let opened = opened.map_err(|unfit| unfit.error)?;
    let Some((file, found)) = opened else {
        return Ok(None);
    };
    let layout = read_layout(&file, &found, &path)?;
    check_key(&layout, &path, key)?;
    Ok(Some(EntryInfo {
        layout,
        path,
        modified: last_use::modified(&found),
        last_use: last_use::last_use(&found, SystemTime::now()),
    }))
}

/// Whether the fan-out directory is there; it must be private.
fn check_fan_out(tree: &Tree, name: &str) -> Result<bool, Box<Unfit>> {
    // Made only for a message: a sound directory is by far the usual case.
    let path = || tree.path.join(name);
    let found = match statat(&tree.directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(false),
        found => {
            found.map_err(|error| Unfit::new(StoreError::read(&path(), "stat", error), None))?
        }
    };
    if trust::file_type(&found) != FileType::Directory {
        let error = StoreError::wrong_type(&path(), "directory", trust::file_type(&found));
        return Err(Unfit::new(error, Some(&found)));
    }
    if !trust::is_private(&found) {
        trust::check_private("directory", &path(), &found)
            .map_err(|error| Unfit::new(error, None))?;
    }
    Ok(true)
}

/// Opens a file that only this user or root can write to; None if there is none.
fn open_file(
    tree: &Tree,
    relative: &str,
    path: &Path,
    more: OFlags,
) -> Result<Option<(OwnedFd, Stat)>, Box<Unfit>> {
    // NONBLOCK: a FIFO must not make us wait for a writer.
    let flags = more | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let failed =
        |operation| move |error| Unfit::new(StoreError::read(path, operation, error), None);
    let wrong_type = |found: &Stat| {
        let error = StoreError::wrong_type(path, "regular file", trust::file_type(found));
        Unfit::new(error, Some(found))
    };
    let file = match openat(&tree.directory, relative, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(None),
        // A symbolic link (LOOP), a socket (NXIO), a device (NODEV): say what it is.
        Err(Errno::LOOP | Errno::NXIO | Errno::NODEV) => {
            let found = statat(&tree.directory, relative, AtFlags::SYMLINK_NOFOLLOW)
                .map_err(failed("stat"))?;
            return Err(wrong_type(&found));
        }
        opened => opened.map_err(failed("open"))?,
    };
    let found = fstat(&file).map_err(failed("stat"))?;
    if trust::file_type(&found) != FileType::RegularFile {
        return Err(wrong_type(&found));
    }
    match trust::check_private("entry", path, &found) {
        Ok(()) => Ok(Some((file, found))),
        Err(error) => Err(Unfit::new(error, Some(&found))),
    }
}

fn read_layout(file: &OwnedFd, found: &Stat, path: &Path) -> Result<EntryLayout, StoreError> {
    let mut page = [0; PAGE_BYTES];
    let mut filled = 0;
    while filled < PAGE_BYTES {
        match rustix::io::pread(file, &mut page[filled..], filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(error) => return Err(StoreError::read(path, "read", error)),
        }
    }
    let length = u64::try_from(found.st_size).unwrap_or(0);
    EntryLayout::parse(&page[..filled], length).map_err(|source| corrupt(path, source))
}

fn read_entry(
    tree: &Tree,
    file: &OwnedFd,
    found: &Stat,
    path: &Path,
    verify: Verify<'_>,
) -> Result<Entry, StoreError> {
    let length = usize::try_from(found.st_size).unwrap_or(0);
    let mapping = if tree.is_local && length >= MAP_FROM_BYTES {
        Mapping::map(file, length).map_err(|error| StoreError::read(path, "map", error))?
    } else {
        if length >= MAP_FROM_BYTES || !length.is_multiple_of(PAGE_BYTES) {
            // The header first: nothing is allocated for a file that is no entry.
            read_layout(file, found, path)?;
        }
        Mapping::copy(file, length).map_err(|error| StoreError::read(path, "read", error))?
    };
    let layout = EntryLayout::parse(mapping.as_ref(), length as u64)
        .map_err(|source| corrupt(path, source))?;
    let checked = layout
        .sections
        .iter()
        .map(|_| AtomicBool::new(false))
        .collect();
    let entry = Entry(Arc::new(Content {
        mapping,
        layout,
        path: path.to_owned(),
        checked,
    }));
    match &tree.mac_key {
        None => entry.check(verify)?,
        // The code is over every section.
        Some(mac_key) => mac_key.check(&entry)?,
    }
    Ok(entry)
}

fn check_asked(entry: &Entry, kind: Kind, key: &Digest) -> Result<(), StoreError> {
    check_key(&entry.0.layout, entry.path(), key)?;
    if entry.kind() == kind {
        return Ok(());
    }
    Err(StoreError::OtherKind {
        path: entry.path().to_owned(),
        expected: kind,
        found: entry.kind(),
    })
}

fn check_key(layout: &EntryLayout, path: &Path, key: &Digest) -> Result<(), StoreError> {
    if layout.key == *key {
        return Ok(());
    }
    let source = FormatError {
        what: "key",
        offset: 32,
        expected: format!("{key} (the file's name)"),
        found: layout.key.to_string(),
    };
    Err(corrupt(path, source))
}

fn corrupt(path: &Path, source: FormatError) -> StoreError {
    StoreError::Corrupt {
        path: path.to_owned(),
        source,
    }
}
