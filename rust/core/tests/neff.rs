//! Laws of the NEFF reader and writer, on generated input.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking, also in its helpers"
)]

use std::io::Read;

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use vllm_neuron_core::neff::{
    Compression, ErrorKind, HEADER_BYTES, Limits, Neff, NeffError, ParseOptions, Tensor,
    WriteRequest, write,
};

type Members = Vec<(String, Vec<u8>)>;

fn tensor(name: &str, shape: &[u64]) -> Tensor {
    Tensor {
        name: name.to_owned(),
        dtype: "float32".to_owned(),
        shape: shape.to_vec(),
    }
}

fn neff(members: &Members, compression: Compression) -> Vec<u8> {
    let members: Vec<_> = members
        .iter()
        .map(|(name, content)| (name.as_str(), content.as_slice()))
        .collect();
    write(&WriteRequest {
        name: "test.neff",
        target: "none",
        compiler_version: "1",
        inputs: &[tensor("x", &[2, 3])],
        outputs: &[tensor("y", &[])],
        members: &members,
        compression,
    })
    .unwrap()
}

fn parse(data: &[u8]) -> Result<Neff<&[u8]>, NeffError> {
    Neff::parse(data, &ParseOptions::default())
}

fn parse_unverified(data: &[u8]) -> Result<Neff<&[u8]>, NeffError> {
    Neff::parse(
        data,
        &ParseOptions {
            verify_hash: false,
            ..ParseOptions::default()
        },
    )
}

/// A header that fits `payload`, apart from its digest.
fn with_header(payload: &[u8]) -> Vec<u8> {
    let mut data = neff(&Vec::new(), Compression::None);
    data.truncate(HEADER_BYTES);
    data[16..24].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    data.extend_from_slice(payload);
    data
}

fn compression() -> impl Strategy<Value = Compression> {
    prop_oneof![Just(Compression::Gzip), Just(Compression::None)]
}

fn members() -> impl Strategy<Value = Members> {
    let path = vec("[a-z][a-z0-9_ é]{0,12}", 1..4).prop_map(|parts| parts.join("/"));
    btree_map(path, vec(any::<u8>(), 0..1500), 0..5)
        .prop_map(|members| members.into_iter().collect())
}

proptest! {
    #[test]
    fn what_is_written_is_what_is_read(members in members(), compression in compression()) {
        let data = neff(&members, compression);
        let parsed = parse(&data).unwrap();
        prop_assert_eq!(parsed.warnings(), &[] as &[String]);
        prop_assert_eq!(parsed.compression(), compression);
        prop_assert_eq!(parsed.inputs(), &[tensor("x", &[2, 3])]);
        prop_assert_eq!(parsed.outputs(), &[tensor("y", &[])]);
        for (name, content) in &members {
            prop_assert_eq!(&*parsed.member(name).unwrap(), content.as_slice());
        }
    }

    #[test]
    fn written_archive_is_what_the_tar_crate_reads(members in members()) {
        let data = neff(&members, Compression::None);
        let mut archive = tar::Archive::new(&data[HEADER_BYTES..]);
        let mut read = Vec::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            read.push((String::from_utf8(entry.path_bytes().into_owned()).unwrap(), content));
        }
        let expected = parse(&data).unwrap().members().len();
        prop_assert_eq!(read.len(), expected);
        prop_assert_eq!(&read[expected - members.len()..], members.as_slice());
    }

    #[test]
    fn archive_of_the_tar_crate_is_read(members in members()) {
        let written = neff(&members, Compression::None);
        let mut builder = tar::Builder::new(Vec::new());
        let parsed = parse(&written).unwrap();
        for member in parsed.members() {
            let content = parsed.member(&member.name).unwrap();
            let mut header = tar::Header::new_ustar();
            header.set_size(content.len() as u64);
            header.set_mode(0o640);
            header.set_mtime(1_700_000_000);
            header.set_uid(1000);
            builder.append_data(&mut header, &member.name, &*content).unwrap();
        }
        let data = with_header(&builder.into_inner().unwrap());
        let reread = parse_unverified(&data).unwrap();
        let names = |neff: &Neff<&[u8]>| -> Vec<(String, u64)> {
            neff.members().iter().map(|member| (member.name.clone(), member.size)).collect()
        };
        prop_assert_eq!(names(&reread), names(&parsed));
    }

    #[test]
    fn flipped_bit_of_the_payload_is_a_checksum_error(
        compression in compression(), place in any::<prop::sample::Index>(), bit in 0_u32..8,
    ) {
        let mut data = neff(&Vec::new(), compression);
        let index = HEADER_BYTES + place.index(data.len() - HEADER_BYTES);
        data[index] ^= 1_u8 << bit;
        prop_assert_eq!(parse(&data).unwrap_err().kind(), ErrorKind::Checksum);
    }

    #[test]
    fn damaged_file_is_read_or_refused_but_never_a_panic(
        compression in compression(),
        members in members(),
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut data = neff(&members, compression);
        for (place, byte) in damage {
            let index = place.index(data.len());
            data[index] = byte;
        }
        if let Ok(parsed) = parse_unverified(&data) {
            for member in parsed.members() {
                let content = parsed.member(&member.name).unwrap();
                prop_assert_eq!(content.len() as u64, member.size);
            }
        }
        data.truncate(cut.index(data.len()));
        prop_assert!(parse_unverified(&data).is_err());
    }

    #[test]
    fn any_payload_is_refused_with_an_error(
        start in prop_oneof![Just(Vec::new()), Just(vec![0x1f, 0x8b, 8, 0])],
        rest in vec(any::<u8>(), 1..3000),
    ) {
        let payload = [start, rest].concat();
        let error = parse_unverified(&with_header(&payload)).unwrap_err();
        prop_assert_eq!(error.kind().status(), 2);
        prop_assert!(error.mismatch().offset <= (HEADER_BYTES + payload.len()) as u64);
    }

    #[test]
    fn any_bytes_are_refused(data in vec(any::<u8>(), 0..2500)) {
        prop_assert!(parse(&data).is_err());
    }
}

/// Parses with one limit changed; 14 members are those that every NEFF has.
fn parse_within(data: &[u8], change: impl Fn(&mut Limits)) -> Result<(), NeffError> {
    let mut options = ParseOptions::default();
    change(&mut options.limits);
    Neff::parse(data, &options).map(|_| ())
}

fn exceeded(result: Result<(), NeffError>) -> &'static str {
    match result.unwrap_err() {
        NeffError::Limit { what, .. } => what,
        other => panic!("{other}"),
    }
}

#[test]
fn every_limit_holds_at_its_edge() {
    let extra = vec![("extra".to_owned(), vec![7; 3000])];
    for compression in [Compression::Gzip, Compression::None] {
        let data = neff(&extra, compression);
        let parsed = parse(&data).unwrap();
        let definition = parsed
            .members()
            .iter()
            .find(|member| member.name == "sg00/def.json")
            .unwrap()
            .size;
        let plain = neff(&extra, Compression::None);
        let archive_bytes = (plain.len() - HEADER_BYTES - 1024) as u64;

        parse_within(&data, |limits| limits.members = 15).unwrap();
        assert_eq!(
            exceeded(parse_within(&data, |limits| limits.members = 14)),
            "members"
        );

        parse_within(&data, |limits| limits.member_bytes = 3000).unwrap();
        let result = parse_within(&data, |limits| limits.member_bytes = 2999);
        assert_eq!(exceeded(result), "bytes of a member");

        parse_within(&data, |limits| limits.total_bytes = archive_bytes).unwrap();
        let result = parse_within(&data, |limits| limits.total_bytes = archive_bytes - 1);
        assert_eq!(exceeded(result), "bytes of the inflated archive");

        parse_within(&data, |limits| {
            limits.name_bytes = "sg00/Activation.json".len();
        })
        .unwrap();
        let result = parse_within(&data, |limits| limits.name_bytes = 19);
        assert_eq!(exceeded(result), "bytes of a name");

        parse_within(&data, |limits| limits.json_bytes = definition).unwrap();
        let result = parse_within(&data, |limits| limits.json_bytes = definition - 1);
        assert_eq!(exceeded(result), "bytes of metadata");
    }
}

#[test]
fn inflate_ratio_holds_for_compressed_archives_only() {
    let extra = vec![("zeros".to_owned(), vec![0; 1 << 20])];
    let strict = |limits: &mut Limits| {
        limits.inflate_floor_bytes = 1 << 16;
        limits.inflate_ratio = 8;
    };
    let result = parse_within(&neff(&extra, Compression::Gzip), strict);
    assert_eq!(exceeded(result), "inflate ratio");
    parse_within(&neff(&extra, Compression::None), strict).unwrap();
}

#[test]
fn member_of_a_plain_archive_is_a_part_of_the_data() {
    let content = vec![5; 1000];
    let data = neff(&vec![("m".to_owned(), content.clone())], Compression::None);
    let parsed = parse(&data).unwrap();
    let member = parsed.member("m").unwrap();
    assert_eq!(&*member, content.as_slice());
    assert!(data.as_ptr_range().contains(&member.as_ptr()));
}

#[test]
fn data_can_be_anything_that_holds_bytes() {
    let data = neff(&Vec::new(), Compression::Gzip);
    let parsed = Neff::parse(data, &ParseOptions::default()).unwrap();
    assert_eq!(parsed.header().name, "test.neff");
    assert_eq!(parsed.subgraphs()[0].definition, "sg00/def.json");
}
