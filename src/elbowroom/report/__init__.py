"""Values -> pages."""
