// The two panels beside the transcript. On a narrow screen at most one is open, above a transcript that stays visible.

const NARROW = window.matchMedia("(max-width: 60rem)");

const panels = ["chats", "settings"].map((id) => ({
  panel: document.getElementById(id),
  toggle: document.getElementById(`${id}_toggle`),
}));

export function startPanels() {
  for (const one of panels) {
    setOpen(one, !NARROW.matches);
    one.toggle.addEventListener("click", () => {
      const open = one.panel.hidden;
      closeOnNarrow();
      setOpen(one, open);
      if (open && NARROW.matches) {
        one.panel.querySelector("button, input, select").focus();
      }
    });
    one.panel.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && NARROW.matches) {
        event.stopPropagation();
        setOpen(one, false);
        one.toggle.focus();
      }
    });
  }
  NARROW.addEventListener("change", () => panels.forEach((one) => setOpen(one, !NARROW.matches)));
}

export function closeOnNarrow() {
  if (NARROW.matches) {
    panels.forEach((one) => setOpen(one, false));
  }
}

export function openSettings() {
  closeOnNarrow();
  setOpen(panels[1], true);
}

function setOpen({ panel, toggle }, open) {
  panel.hidden = !open;
  toggle.setAttribute("aria-expanded", String(open));
}
