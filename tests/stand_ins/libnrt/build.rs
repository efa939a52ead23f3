//! Gives the library the name that the real one has.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnrt.so.1");
    println!("cargo::rerun-if-changed=build.rs");
}
