//! What a file system that has everything never makes the store do; the rest is in `tests/store`.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use super::lookup::Verify;
use super::publish::{self, Link, Prepared};
use super::tree::Tree;
use super::{Lookup, Store, lookup};
use crate::digest::Digest;
use crate::entry::{EntryWriter, Kind};
use crate::mmap::Mapping;

const CONTENT: &[u8] = &[7; 10_000];

fn key() -> Digest {
    Digest::of(b"key")
}

fn writer() -> EntryWriter<'static> {
    EntryWriter::new(Kind::Neff, &key(), &[("record", b"{}"), ("neff", CONTENT)]).unwrap()
}

fn files(directory: &Path) -> Vec<String> {
    let listed = std::fs::read_dir(directory).map(|files| {
        files
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect()
    });
    listed.unwrap_or_default()
}

#[test]
fn copies_outlive_a_truncation_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(&folder.path().join("store")).unwrap();
    store.put(Kind::Neff, &key(), &[("neff", CONTENT)]).unwrap();
    let mut tree = Tree::open(store.root(), None, false).unwrap().unwrap();
    tree.is_local = false;
    let Ok(Some(entry)) = lookup::open(&tree, Kind::Neff, &key(), Verify::Sections(&[])) else {
        panic!("the entry was published");
    };
    std::fs::set_permissions(entry.path(), PermissionsExt::from_mode(0o600)).unwrap();
    std::fs::File::options()
        .write(true)
        .open(entry.path())
        .unwrap()
        .set_len(0)
        .unwrap();
    let bytes = entry.section("neff").unwrap().unwrap();
    assert_eq!(bytes.as_ref(), CONTENT);
    assert_eq!(bytes.as_ref().as_ptr().addr() % 4096, 0);
    assert!(matches!(
        store.get(Kind::Neff, &key(), Verify::All),
        Lookup::Refused(_)
    ));
}

#[test]
fn a_copy_of_a_file_that_became_shorter_fails() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096).unwrap();
    assert_eq!(Mapping::copy(&file, 4096).unwrap().as_ref(), &[0; 4096]);
    let error = Mapping::copy(&file, 8192).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);
}

#[test]
fn named_temporary_files_publish_and_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("store");
    let tree = Tree::open(&root, None, true).unwrap().unwrap();
    let temporary = root.join("v1/tmp");
    let directory = publish::open_inside(&tree, "ab").unwrap().unwrap();
    let path = root.join("v1/ab/name");
    for expected in [Link::Done, Link::Taken] {
        let mut prepared = Prepared::write(&tree, &writer(), true).unwrap().unwrap();
        assert_eq!(files(&temporary).len(), 1);
        assert_eq!(prepared.link(&directory, "name", &path).unwrap(), expected);
        drop(prepared);
        assert_eq!(files(&temporary), [""; 0]);
    }
    assert_eq!(std::fs::read(&path).unwrap(), writer().to_bytes());
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!((metadata.mode() & 0o7777, metadata.nlink()), (0o400, 1));
}

#[test]
fn a_file_without_a_name_vanishes_with_its_writer() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("store");
    let tree = Tree::open(&root, None, true).unwrap().unwrap();
    let prepared = Prepared::write(&tree, &writer(), false).unwrap().unwrap();
    assert_eq!(files(&root.join("v1")), [""; 0]);
    drop(prepared);
    assert_eq!(files(&root.join("v1")), [""; 0]);
}

#[test]
fn a_removed_temporary_file_is_written_again() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("store");
    let tree = Tree::open(&root, None, true).unwrap().unwrap();
    let directory = publish::open_inside(&tree, "ab").unwrap().unwrap();
    let mut prepared = Prepared::write(&tree, &writer(), true).unwrap().unwrap();
    for name in files(&root.join("v1/tmp")) {
        std::fs::remove_file(root.join("v1/tmp").join(name)).unwrap();
    }
    let linked = prepared
        .link(&directory, "name", &root.join("v1/ab/name"))
        .unwrap();
    assert_eq!(linked, Link::Vanished);
}

#[test]
fn writing_into_a_removed_tree_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("store");
    let tree = Tree::open(&root, None, true).unwrap().unwrap();
    let mut prepared = Prepared::write(&tree, &writer(), false).unwrap().unwrap();
    let directory = publish::open_inside(&tree, "ab").unwrap().unwrap();
    std::fs::remove_dir_all(&root).unwrap();
    assert!(tree.is_gone());
    for named in [false, true] {
        assert!(Prepared::write(&tree, &writer(), named).unwrap().is_none());
    }
    assert!(publish::open_inside(&tree, "cd").unwrap().is_none());
    let linked = prepared
        .link(&directory, "name", &root.join("v1/ab/name"))
        .unwrap();
    assert_eq!(linked, Link::Vanished);
}

#[test]
fn a_good_entry_that_took_the_place_of_a_bad_one_is_not_set_aside() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("store");
    let store = Store::new(&root).unwrap();
    store.put(Kind::Neff, &key(), &[("neff", CONTENT)]).unwrap();
    let tree = Tree::open(&root, None, false).unwrap().unwrap();
    let path = tree.entry_path(&key());
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    std::fs::write(&path, b"bad").unwrap();
    let Err(unfit) = lookup::open(&tree, Kind::Neff, &key(), Verify::All) else {
        panic!("the entry is bad");
    };
    // Another process replaces the bad one between the look and the rename.
    let Lookup::Refused(_) = store.get(Kind::Neff, &key(), Verify::All) else {
        panic!("the entry is bad");
    };
    assert!(
        store
            .put(Kind::Neff, &key(), &[("neff", CONTENT)])
            .unwrap()
            .is_new
    );
    store.set_aside(&tree, &key(), &unfit).unwrap();
    assert!(matches!(
        store.get(Kind::Neff, &key(), Verify::All),
        Lookup::Hit(_)
    ));
}
