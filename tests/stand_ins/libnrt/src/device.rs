//! The emulated device: a Python process that runs host programs over shared memory.
//!
//! Requests and answers are lines of JSON. A storage is a file that both sides map.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use memmap2::MmapMut;
use serde_json::{Value, json};

use crate::settings::Settings;

/// The process and its folder in shared memory.
pub(crate) struct Device {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
    folder: PathBuf,
}

/// Memory of the device, mapped here.
pub(crate) struct Storage {
    pub(crate) id: u64,
    pub(crate) map: MmapMut,
    path: PathBuf,
    /// The device holds a newer copy: ask it to write that back before looking at the map.
    pub(crate) is_resident: bool,
}

impl Device {
    /// Starts the process.
    pub(crate) fn start(settings: &Settings) -> io::Result<Self> {
        let folder = PathBuf::from(format!("/dev/shm/stand-in-nrt-{}", std::process::id()));
        // Of an earlier process of this number that was killed together with its device.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder)?;
        let mut child = Command::new(&settings.python)
            .arg("-I")
            .arg(&settings.program)
            .arg(&folder)
            .env_remove("LD_PRELOAD")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(requests), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("the pipes of the emulator are missing"));
        };
        Ok(Self {
            child,
            requests,
            answers: BufReader::new(answers),
            folder,
        })
    }

    /// Sends a request and waits for its answer, the value of `answer`; an `error` is text.
    pub(crate) fn ask(&mut self, request: &Value) -> Result<Value, String> {
        let line = format!("{request}\n");
        self.requests
            .write_all(line.as_bytes())
            .and_then(|()| self.requests.flush())
            .map_err(|error| format!("the emulator is gone: {error}"))?;
        let mut answer = String::new();
        let length = self
            .answers
            .read_line(&mut answer)
            .map_err(|error| error.to_string())?;
        if length == 0 {
            return Err("the emulator ended".into());
        }
        let answer: Value = serde_json::from_str(&answer).map_err(|error| error.to_string())?;
        match answer.get("error").and_then(Value::as_str) {
            Some(error) => Err(error.to_owned()),
            None => Ok(answer.get("answer").cloned().unwrap_or_default()),
        }
    }

    /// Makes zeroed memory that both sides map.
    pub(crate) fn storage(&self, id: u64, size: u64) -> io::Result<Storage> {
        let path = self.folder.join(id.to_string());
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)?;
        file.set_len(size)?;
        Ok(Storage {
            id,
            map: map(&file)?,
            path,
            is_resident: false,
        })
    }

    /// Writes a NEFF where the process finds it.
    pub(crate) fn put_neff(&self, id: u64, neff: &[u8]) -> io::Result<PathBuf> {
        let path = self.folder.join(format!("{id}.neff"));
        fs::write(&path, neff)?;
        Ok(path)
    }

    /// Brings the map up to date with what the device holds.
    pub(crate) fn flush(&mut self, storage: &mut Storage) -> Result<(), String> {
        if storage.is_resident {
            self.ask(&json!({"call": "flush", "storage": storage.id}))?;
            storage.is_resident = false;
        }
        Ok(())
    }

    /// Tells the device to forget a storage.
    pub(crate) fn forget(&mut self, storage: &Storage) {
        // A device that is gone has forgotten it.
        let _ = self.ask(&json!({"call": "forget", "storage": storage.id}));
        remove(&storage.path);
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn map(file: &File) -> io::Result<MmapMut> {
    // SAFETY: the file is this process's own; the other side writes only while this one waits.
    unsafe { MmapMut::map_mut(file) }
}

fn remove(path: &Path) {
    let _ = fs::remove_file(path);
}
