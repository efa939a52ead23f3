//! Lock descriptors in forked children.
//!
//! `flock` belongs to the open file, which a forked child shares: while the child lives, the lock
//! of its dead parent would live too. So every lock descriptor is in a table, without a mutex since
//! a mutex may be held when the process forks, and the child replaces its copies.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use rustix::fs::{CWD, Mode, OFlags, openat};

/// Lock descriptors of this process; -1 is a free place. A lock that finds no place works too, but
/// a forked child keeps it for as long as it lives.
static DESCRIPTORS: [AtomicI32; 1024] = [const { AtomicI32::new(-1) }; 1024];
/// How many forks lie between the first process and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// A lock descriptor that a forked child does not keep.
#[derive(Debug)]
pub(super) struct LockDescriptor {
    fd: OwnedFd,
    place: Option<&'static AtomicI32>,
}

impl LockDescriptor {
    pub(super) fn new(fd: OwnedFd) -> Self {
        let raw = fd.as_raw_fd();
        let place = DESCRIPTORS.iter().find(|place| {
            place
                .compare_exchange(-1, raw, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        });
        Self { fd, place }
    }
}

impl AsFd for LockDescriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for LockDescriptor {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            place.store(-1, Ordering::Release);
        }
    }
}

/// Which side of how many forks this process is on: changes in the child.
pub(super) fn generation() -> u32 {
    GENERATION.load(Ordering::Acquire)
}

/// Gives up the child's copies of its parent's locks. To be called in a forked child, before it
/// takes locks of its own.
///
/// Each descriptor becomes one of `/dev/null` instead of being closed, so that its number is not
/// given to another file while a [`LockDescriptor`] still refers to it.
pub fn after_fork_in_child() {
    GENERATION.fetch_add(1, Ordering::AcqRel);
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let Ok(null) = openat(CWD, "/dev/null", flags, Mode::empty()) else {
        return;
    };
    for place in &DESCRIPTORS {
        let raw = place.load(Ordering::Acquire);
        if raw < 0 {
            continue;
        }
        // SAFETY: the table holds descriptors that are open: a LockDescriptor leaves it before it
        // closes. Only the forking thread exists in the child, so none leaves it now. The
        // descriptor is not closed here (ManuallyDrop), its LockDescriptor still owns it.
        let mut held = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(raw) });
        // Failure leaves the copy: the parent's lock then lives until this child ends.
        let _ = rustix::io::dup3(&null, &mut held, rustix::io::DupFlags::CLOEXEC);
    }
}
