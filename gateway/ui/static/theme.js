// Before anything is drawn: the theme that was chosen here, so that nothing flashes.
try {
  const theme = localStorage.getItem("marq-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* no storage: as the system has it */ }
