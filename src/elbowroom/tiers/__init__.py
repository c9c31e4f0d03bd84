"""Where bytes live below the device."""
