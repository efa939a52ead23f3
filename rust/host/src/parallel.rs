//! Work in pieces, by the calling thread and whatever threads of a pool come to help.

use std::ffi::c_void;
use std::hint;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// A thread pool of somebody else.
pub trait Pool {
    /// Threads that may work at once, the calling one included.
    fn threads(&self) -> usize;

    /// Has `task(data)` called once, some time, by a thread of the pool; false if it will not be.
    fn start(&self, task: unsafe extern "C" fn(*mut c_void), data: *mut c_void) -> bool;
}

/// No pool: the calling thread does everything.
pub struct Inline;

impl Pool for Inline {
    fn threads(&self) -> usize {
        1
    }

    fn start(&self, _: unsafe extern "C" fn(*mut c_void), _: *mut c_void) -> bool {
        false
    }
}

/// Turns of waiting before a waiting thread offers its processor to others.
const SPINS: usize = 2000;

/// Ends the process when a piece of work panics: other threads would go on with memory that its
/// owner, unwinding, frees.
struct NoUnwinding;

impl Drop for NoUnwinding {
    fn drop(&mut self) {
        if thread::panicking() {
            process::abort();
        }
    }
}

struct Shared<'a> {
    pieces: usize,
    /// The first piece that nobody has taken.
    next: AtomicUsize,
    finished: AtomicUsize,
    work: &'a (dyn Fn(usize) + Sync),
}

impl Shared<'_> {
    fn take_part(&self) {
        let _guard = NoUnwinding;
        loop {
            let piece = self.next.fetch_add(1, Ordering::Relaxed);
            if piece >= self.pieces {
                return;
            }
            (self.work)(piece);
            self.finished.fetch_add(1, Ordering::Release);
        }
    }
}

/// Calls `work` once with each of 0 to `pieces` - 1 and returns when all calls have.
///
/// A thread of the pool that comes too late finds nothing to do; nobody waits for one to come, so
/// this may be called from threads of the same pool.
pub(crate) fn in_pieces(pool: &dyn Pool, pieces: usize, work: &(dyn Fn(usize) + Sync)) {
    let helpers = pool.threads().min(pieces).saturating_sub(1);
    // SAFETY: `work` is called for a piece only, and this function outlives all pieces. The
    // counters, which a late thread reads, live as long as its share of the Arc.
    let work: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(work) };
    let shared = Arc::new(Shared {
        pieces,
        next: AtomicUsize::new(0),
        finished: AtomicUsize::new(0),
        work,
    });
    for _ in 0..helpers {
        let share = Arc::into_raw(Arc::clone(&shared)).cast_mut().cast();
        if !pool.start(help, share) {
            // SAFETY: the share was not passed on.
            drop(unsafe { Arc::from_raw(share.cast::<Shared<'static>>()) });
            break;
        }
    }
    shared.take_part();
    let mut turns = 0;
    while shared.finished.load(Ordering::Acquire) < pieces {
        turns += 1;
        if turns < SPINS {
            hint::spin_loop();
        } else {
            thread::yield_now();
        }
    }
}

unsafe extern "C" fn help(share: *mut c_void) {
    // SAFETY: made by `Arc::into_raw` for this call.
    let shared = unsafe { Arc::from_raw(share.cast::<Shared<'static>>()) };
    shared.take_part();
}
