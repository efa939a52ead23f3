//! A place in graph bytes: the integers and texts that everything else is made of.

use super::FormatError;

/// Bytes and how far they were read.
pub(super) struct Cursor<'a> {
    data: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(data: &'a [u8]) -> Self {
        Self { data, at: 0 }
    }

    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn left(&self) -> usize {
        self.data.len().saturating_sub(self.at)
    }

    pub(super) fn error(
        &self,
        what: &'static str,
        expected: impl ToString,
        found: impl ToString,
    ) -> FormatError {
        FormatError::new(what, self.at, expected, found)
    }

    pub(super) fn take(
        &mut self,
        what: &'static str,
        count: usize,
    ) -> Result<&'a [u8], FormatError> {
        let taken = self
            .at
            .checked_add(count)
            .and_then(|end| self.data.get(self.at..end));
        let Some(taken) = taken else {
            let expected = format!("{count} bytes");
            return Err(self.error(what, expected, format!("{} until the end", self.left())));
        };
        self.at = self.at.saturating_add(count);
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(
        &mut self,
        what: &'static str,
    ) -> Result<[u8; N], FormatError> {
        let start = self.at;
        let taken = self.take(what, N)?;
        taken
            .first_chunk()
            .copied()
            .ok_or_else(|| FormatError::new(what, start, N, taken.len()))
    }

    pub(super) fn tag(&mut self, what: &'static str) -> Result<u8, FormatError> {
        self.array(what).map(|[tag]| tag)
    }

    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, FormatError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn i64(&mut self, what: &'static str) -> Result<i64, FormatError> {
        self.array(what).map(i64::from_le_bytes)
    }

    pub(super) fn bits(&mut self, what: &'static str) -> Result<u64, FormatError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of items that take at least `size` bytes each.
    pub(super) fn count(&mut self, what: &'static str, size: usize) -> Result<usize, FormatError> {
        let start = self.at;
        let count = usize::try_from(self.u32(what)?).unwrap_or(usize::MAX);
        let most = self.left() / size.max(1);
        if count > most {
            let expected = format!("at most {most}, for the bytes that follow");
            return Err(FormatError::new(what, start, expected, count));
        }
        Ok(count)
    }

    pub(super) fn bytes(&mut self, what: &'static str) -> Result<&'a [u8], FormatError> {
        let length = self.count(what, 1)?;
        self.take(what, length)
    }

    pub(super) fn text(&mut self, what: &'static str) -> Result<&'a str, FormatError> {
        let bytes = self.bytes(what)?;
        str::from_utf8(bytes).map_err(|error| {
            let start = self.at.saturating_sub(bytes.len());
            let found = format!("bytes that are none ({} of them are)", error.valid_up_to());
            FormatError::new(what, start, "UTF-8", found)
        })
    }

    /// A name that is made of letters, digits, `_` and those of `others`.
    pub(super) fn plain_name(
        &mut self,
        what: &'static str,
        others: &str,
    ) -> Result<&'a str, FormatError> {
        let start = self.at;
        let name = self.text(what)?;
        let is_plain = |letter: char| {
            letter.is_ascii_alphanumeric() || letter == '_' || others.contains(letter)
        };
        let begins_well = name.starts_with(|first: char| !first.is_ascii_digit());
        if begins_well && name.chars().all(is_plain) {
            return Ok(name);
        }
        Err(FormatError::new(what, start, "a name", quoted(name)))
    }
}

/// Text of unknown length for a message.
pub(super) fn quoted(text: &str) -> String {
    let short: String = text.chars().take(80).collect();
    format!("{short:?}")
}
