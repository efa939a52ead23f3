//! Read-only bytes of a file: mapped, or copied into memory. All unsafe code of mapping is here.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use memmap2::{Mmap, MmapOptions};
use rustix::fs::fstatfs;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// `f_type` of file systems whose files cannot change under a map behind this kernel's back.
///
/// Source: `linux/magic.h` and, for zfs, f2fs and bcachefs, their own headers. Everything else
/// (NFS, CIFS, FUSE, 9p, Lustre, GPFS, ...) is copied: a truncation on another host would raise
/// SIGBUS in whoever touches the map.
const LOCAL_FILE_SYSTEMS: [u64; 11] = [
    0x0000_ef53, // ext2, ext3, ext4
    0x5846_5342, // xfs
    0x9123_683e, // btrfs
    0x0102_1994, // tmpfs
    0x8584_58f6, // ramfs
    0x794c_7630, // overlay
    0x2fc1_2fc1, // zfs
    0xf2f5_2010, // f2fs
    0xca45_1a4e, // bcachefs
    0x7371_7368, // squashfs
    0xe0f5_e1e2, // erofs
];

/// Whether files of the file system of `fd` may be mapped.
pub(crate) fn is_local(fd: impl AsFd) -> bool {
    // `f_type` is a signed word on some architectures; the magic numbers are 32 bits.
    #[allow(
        clippy::cast_sign_loss,
        clippy::cast_lossless,
        clippy::unnecessary_cast
    )]
    fstatfs(fd).is_ok_and(|info| LOCAL_FILE_SYSTEMS.contains(&(info.f_type as u64 & 0xffff_ffff)))
}

/// Memory that is aligned as maps are.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
pub(crate) struct Page([u8; 4096]);

/// The bytes of a whole file; page-aligned, constant while they are held.
#[derive(Debug)]
pub(crate) enum Mapping {
    /// Pages of the page cache.
    Mapped(Mmap),
    /// A private copy.
    Copied(Vec<Page>),
}

impl Mapping {
    /// Maps the first `length` bytes of a file.
    ///
    /// The file must be a published entry or be treated as one: on a local file system, owned by
    /// this user or root and not writable by others, and `length` its length.
    pub(crate) fn map(file: impl AsFd, length: usize) -> io::Result<Self> {
        let file = file.as_fd().as_raw_fd();
        // SAFETY: the caller has checked that only this user and root can write to the file, and no
        // code of the store writes to, truncates or renames over a published file. A user who
        // truncates his own cache entries while a process reads them gets SIGBUS, not other
        // users' bytes; that is the accepted price of mapping.
        unsafe { MmapOptions::new().len(length).map(file) }.map(Self::Mapped)
    }

    /// Reads the first `length` bytes, whole pages, of a file into memory.
    pub(crate) fn copy(file: impl AsFd, length: usize) -> io::Result<Self> {
        if !length.is_multiple_of(size_of::<Page>()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut copy = Page::new_vec_zeroed(length / size_of::<Page>())
            .map_err(|_| io::ErrorKind::OutOfMemory)?;
        let bytes = copy.as_mut_slice().as_mut_bytes();
        let mut filled = 0_usize;
        while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match rustix::io::pread(&file, rest, filled as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled = filled.saturating_add(count),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Self::Copied(copy))
    }
}

impl AsRef<[u8]> for Mapping {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Mapped(bytes) => bytes,
            Self::Copied(pages) => pages.as_slice().as_bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::is_local;

    #[test]
    fn file_systems_that_nobody_listed_are_not_local() {
        // procfs is on no list, as NFS is not; its files change without a write.
        assert!(!is_local(File::open("/proc/self").unwrap()));
        assert!(is_local(File::open("/dev").unwrap()));
    }
}
