//! A pool for tests.

use std::ffi::c_void;
use std::sync::Mutex;
use std::thread::{self, JoinHandle};

use vllm_neuron_host::Pool;

/// Threads of its own for each piece of help.
pub(crate) struct Threads(Mutex<Vec<JoinHandle<()>>>);

impl Threads {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    pub(crate) fn join(self) {
        for thread in self.0.into_inner().unwrap() {
            thread.join().unwrap();
        }
    }
}

impl Pool for Threads {
    fn threads(&self) -> usize {
        5
    }

    fn start(&self, task: unsafe extern "C" fn(*mut c_void), data: *mut c_void) -> bool {
        let data = data as usize;
        let work = move || {
            // SAFETY: called once, with what was passed.
            unsafe { task(data as *mut c_void) }
        };
        self.0.lock().unwrap().push(thread::spawn(work));
        true
    }
}
