// A field above each table of class "searchable": shows the rows that hold every word typed into it.
document.querySelectorAll("div.searchable").forEach((box) => {
  const field = document.createElement("input");
  const count = document.createElement("span");
  field.type = "search";
  field.placeholder = box.dataset.hint;
  field.setAttribute("aria-label", box.dataset.hint);
  box.prepend(field, count);
  const rows = Array.from(box.querySelectorAll("tbody tr"), (row) => [row, row.textContent.toLowerCase()]);
  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const [row, text] of rows) {
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    count.textContent = ` ${shown} of ${rows.length}`;
  };
  field.addEventListener("input", show);
  show();
});
