//! Walking over the files of a store.

use rustix::fs::{AtFlags, Dir, FileType, Stat, statat};
use rustix::io::Errno;

use super::error::StoreError;
use super::lookup::{self, EntryInfo};
use super::tree::Tree;
use super::trust;
use crate::digest::Digest;

/// Lists entries by their headers, in no order.
pub(super) fn list(tree: &Tree, found: &mut Vec<EntryInfo>, problems: &mut Vec<StoreError>) {
    for fan_out in fan_outs(tree, problems) {
        for key in keys(tree, &fan_out, problems) {
            match lookup::read_info(tree, &key) {
                Ok(info) => found.extend(info),
                Err(error) => problems.push(error),
            }
        }
    }
}

/// Lists regular files in the places of entries, in no order, without opening one.
pub(super) fn list_files(tree: &Tree, problems: &mut Vec<StoreError>) -> Vec<(Digest, Stat)> {
    let mut files = Vec::new();
    for fan_out in fan_outs(tree, problems) {
        let keys = keys(tree, &fan_out, problems);
        files.reserve(keys.len());
        for key in keys {
            let relative = super::tree::relative_path(&key);
            match statat(&tree.directory, relative, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(found) if trust::file_type(&found) == FileType::RegularFile => {
                    files.push((key, found));
                }
                // Gone, or no file: nothing that takes space.
                Ok(_) | Err(Errno::NOENT) => {}
                Err(error) => {
                    problems.push(StoreError::read(&tree.entry_path(&key), "stat", error));
                }
            }
        }
    }
    files
}

/// The names of the directories of entries.
fn fan_outs(tree: &Tree, problems: &mut Vec<StoreError>) -> Vec<String> {
    let mut names = names(tree, ".", problems);
    names.retain(|name| name.len() == 2 && name.bytes().all(|digit| digit.is_ascii_hexdigit()));
    names
}

/// The keys in a directory of entries; other names are nothing of ours.
fn keys(tree: &Tree, fan_out: &str, problems: &mut Vec<StoreError>) -> Vec<Digest> {
    names(tree, fan_out, problems)
        .into_iter()
        .filter_map(|name| name.parse().ok())
        .filter(|key: &Digest| super::tree::fan_out(&key.to_string()) == fan_out)
        .collect()
}

/// The names in a directory of the tree; none if it is gone.
pub(super) fn names(tree: &Tree, name: &str, problems: &mut Vec<StoreError>) -> Vec<String> {
    let listed = tree.open_directory(name, false).and_then(|directory| {
        let Some(directory) = directory else {
            return Ok(Vec::new());
        };
        let failed = |error| StoreError::read(&tree.path.join(name), "list", error);
        let mut names = Vec::new();
        for file in Dir::read_from(&directory).map_err(failed)? {
            names.extend(
                file.map_err(failed)?
                    .file_name()
                    .to_str()
                    .map(str::to_owned),
            );
        }
        Ok(names)
    });
    listed.unwrap_or_else(|error| {
        problems.push(error);
        Vec::new()
    })
}
