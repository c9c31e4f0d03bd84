"""The tests are a package, so that nothing installed under the same name is found in its place."""
